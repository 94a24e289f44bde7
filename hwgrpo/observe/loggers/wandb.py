"""The metrics on Weights & Biases; WANDB_MODE=offline keeps them in the run's folder for `wandb sync`.

A run that the process has open, by `wandb.init` in a script, gets them instead of a new one, and stays open.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from hwgrpo.observe.loggers.tracking_service import ServiceLogger, ServiceRun

STEP = "training/global_step"
"""Metric that charts are drawn over. W&B's own step would refuse the validation of a step it has closed."""


class WandbLogger(ServiceLogger):
    """Sends each line of metrics as a row of a W&B run with a step column of ours."""

    service = "wandb"
    remedy = "log in with `wandb login`, set WANDB_MODE=offline"

    def _start(self, run: ServiceRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._is_ours = wandb.run is None
        self._run = self._made(wandb, run) if self._is_ours else wandb.run
        if not self._is_ours:
            self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run.define_metric("*", step_metric=STEP)

    def _made(self, wandb: Any, run: ServiceRun) -> Any:
        return wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=str(self._run_dir),
            config=dict(run.settings),
            allow_val_change=run.exists,  # settings may change over a resume
            resume="allow",
            # our output has a live panel and texts of the model: neither is for upload
            settings=wandb.Settings(console="off"),
        )

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def _finish(self, failed: bool) -> None:
        if self._is_ours:
            self._run.finish(exit_code=int(failed))
