"""The metrics in trackio: a local database (`trackio show`), or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hwgrpo.observe.loggers.tracking_service import ServiceLogger, ServiceRun


class TrackioLogger(ServiceLogger):
    """Sends metrics to a trackio run. trackio finds a run by its name, so part of the id is added to it."""

    service = "trackio"
    remedy = "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to keep metrics on this machine"

    def _start(self, run: ServiceRun) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:6]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _finish(self, failed: bool) -> None:
        self._run.finish()
