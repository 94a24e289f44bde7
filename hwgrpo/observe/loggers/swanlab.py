"""The metrics on SwanLab; SWANLAB_MODE=offline keeps them in the run's folder for `swanlab sync`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hwgrpo.observe.loggers.tracking_service import ServiceLogger, ServiceRun

FOLDER = "swanlog"


class SwanLabLogger(ServiceLogger):
    """Sends metrics to a SwanLab run."""

    service = "swanlab"
    remedy = "log in with `swanlab login`, set SWANLAB_MODE=offline"

    def _start(self, run: ServiceRun) -> None:
        swanlab: Any = importlib.import_module("swanlab")
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            log_dir=str(self._run_dir / FOLDER),
            config=dict(run.settings),
            resume="allow",
            # our output has a live panel and texts of the model: neither is for upload
            settings=swanlab.Settings(console={"proxy_type": "none"}),
        )

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _finish(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")
