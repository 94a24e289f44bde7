"""What loggers to outside services share: which run there is ours, and which steps it already has."""

from __future__ import annotations

import json
import logging
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hwgrpo.errors import RunError
from hwgrpo.observe.saved_config import saved_settings
from hwgrpo.support.run_files import write_whole

PROJECT = "hwgrpo"
"""Project of runs whose `observe.project` is null."""


@dataclass(frozen=True)
class ServiceRun:
    """A run as a service knows it."""

    id: str
    project: str
    name: str
    settings: Mapping[str, Any]
    """config.yaml, without secrets."""
    exists: bool
    """Whether an earlier process made it and it is to be continued."""


@dataclass
class _State:
    """What a service has been sent; lies in the run's folder as `<service>.json`."""

    id: str
    last_step: int = -1


class ServiceLogger(ABC):
    """Sends metrics to one run of a service, over all processes that a resumed run takes.

    Services cannot remove sent steps. After a resume, steps that an earlier process has sent are therefore
    not sent again, so that steps never go back; only the last of them is, for its validation may be missing. Where a
    resumed run computes other numbers than the process that was killed, those of these steps are in metrics.jsonl
    alone. Services send in the background: steps in flight at a kill are missing there, too.

    Args:
        run_dir: folder of the run.
    """

    service: str
    """Name of the service's package and logger."""
    remedy: str
    """What to do when the service refuses to start."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = run_dir / f"{self.service}.json"
        self._state: _State | None = None
        self._sent_before = -1

    def cut_back(self, step: int) -> None:
        """Start a run, or continue that of an earlier process; with a negative step always a new one."""
        if step < 0:
            self._file.unlink(missing_ok=True)
        self._begin()
        if self._sent_before > step >= 0:
            logging.getLogger(__name__).warning(
                "%s has steps %d to %d from before this start and cannot take them back: it gets what comes after, "
                "metrics.jsonl has this run's",
                self.service,
                step + 1,
                self._sent_before,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of one step, unless an earlier process has gone beyond it."""
        state = self._state or self._begin()
        if step < self._sent_before:
            return
        self._send(step, values)
        if step > state.last_step:
            state.last_step = step
            self._save(state)

    def close(self) -> None:
        """End the run there: as failed when an error is on its way through the caller."""
        if self._state is not None:
            self._state = None
            self._finish(failed=sys.exc_info()[0] is not None)

    @abstractmethod
    def _start(self, run: ServiceRun) -> None:
        """Start the service and make or continue `run`."""

    @abstractmethod
    def _send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values; called again for a step that is also validated."""

    @abstractmethod
    def _finish(self, failed: bool) -> None:
        """Send the rest and end the run."""

    def _begin(self) -> _State:
        from hwgrpo.config import Config
        from hwgrpo.config.written_config import shown_settings

        exists = self._file.exists()
        state = (
            _State(**json.loads(self._file.read_text(encoding="utf-8"))) if exists else _State(uuid.uuid4().hex[:16])
        )
        settings = saved_settings(self._run_dir)
        observe = settings.get("observe", {})
        run = ServiceRun(
            id=state.id,
            project=observe.get("project") or PROJECT,
            name=observe.get("run_name") or self._run_dir.resolve().name,
            settings=shown_settings(settings, Config),  # others see it there
            exists=exists,
        )
        try:
            self._start(run)
        except Exception as error:
            raise RunError(
                f"the logger {self.service} could not start: {error}; {self.remedy}, or take {self.service} out of "
                "observe.loggers"
            ) from error
        self._save(state)
        self._state, self._sent_before = state, state.last_step
        return state

    def _save(self, state: _State) -> None:
        write_whole(self._file, json.dumps(asdict(state)))
