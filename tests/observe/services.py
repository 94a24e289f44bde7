"""Stand-ins for the packages wandb, trackio and swanlab that write down how they are called.

Their functions have the parameters of the real ones (wandb 0.31.0, trackio 0.43.0, swanlab 0.10.3), so a misspelt or
misplaced argument fails here as it would there. What they do not prove: that the real ones accept the values, deliver
them, and show them as one run.
"""

from __future__ import annotations

import importlib.machinery
import types
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


class WandbRun:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.config = self

    def update(self, d: dict, allow_val_change=None) -> None:
        self._calls.append(("config", {"settings": d, "allow_val_change": allow_val_change}))

    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None, overwrite=None) -> None:
        self._calls.append(("define_metric", {"name": name, "step_metric": step_metric}))

    def log(self, data: dict, step=None, commit=None) -> None:
        self._calls.append(("log", {"data": data, "step": step}))

    def finish(self, exit_code: int | None = None) -> None:
        self._calls.append(("finish", {"exit_code": exit_code}))


def wandb(calls: Calls) -> types.ModuleType:
    def init(
        entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
        config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None,
        force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None, tensorboard=None,
        sync_tensorboard=None, monitor_gym=None, settings=None,
    ) -> WandbRun:  # fmt: skip
        calls.append(("init", {k: v for k, v in locals().items() if v is not None and k != "calls"}))
        return WandbRun(calls)

    return _module("wandb", run=None, init=init, Settings=lambda *, console: {"console": console})


class TrackioRun:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def log(self, metrics: dict, step: int | None = None) -> None:
        self._calls.append(("log", {"data": metrics, "step": step}))

    def finish(self) -> None:
        self._calls.append(("finish", {}))


def trackio(calls: Calls) -> types.ModuleType:
    def init(
        project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
        resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
        auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
    ) -> TrackioRun:  # fmt: skip
        calls.append(("init", {k: v for k, v in locals().items() if v is not None and k != "calls"}))
        return TrackioRun(calls)

    return _module("trackio", init=init)


class SwanLabRun:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def log(self, data: dict, step: int | None = None) -> None:
        self._calls.append(("log", {"data": data, "step": step}))

    def finish(self, state="success", error=None, async_log_timeout=None) -> None:
        assert state in ("success", "crashed", "aborted")
        self._calls.append(("finish", {"state": state}))


def swanlab(calls: Calls) -> types.ModuleType:
    def init(
        *, reinit=None, log_dir=None, mode=None, workspace=None, project=None, public=None, name=None, color=None,
        description=None, job_type=None, group=None, tags=None, id=None, resume=None, parallel=None, config=None,
        settings=None, callbacks=None,
    ) -> SwanLabRun:  # fmt: skip
        calls.append(("init", {k: v for k, v in locals().items() if v is not None and k != "calls"}))
        return SwanLabRun(calls)

    return _module("swanlab", init=init, Settings=lambda *, console: {"console": console})


FAKES = {"wandb": wandb, "trackio": trackio, "swanlab": swanlab}


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=f"{name}/__init__.py")
    vars(module).update(attributes)
    return module
