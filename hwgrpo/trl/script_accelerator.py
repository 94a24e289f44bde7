"""What scripts read of accelerate's Accelerator: ranks, the device, printing, waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from hwgrpo.errors import ConfigError
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.trl.trl_errors import MissingName


class ScriptAccelerator:
    """The ranks and the device of a trainer, under accelerate's names; its `state` has them, too.

    Args:
        device: returns the run's device.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        launched = launched_rank()
        self.process_index, self.local_process_index = launched.rank, launched.local_rank
        self.num_processes = launched.world_size
        self.is_main_process = self.process_index == 0
        self.is_local_main_process = self.local_process_index == 0
        self.is_last_process = self.process_index == self.num_processes - 1

    @property
    def device(self) -> torch.device:
        """Return this process's device."""
        return self._device()

    @property
    def state(self) -> ScriptAccelerator:
        """Return this object, which has the ranks of accelerate's AcceleratorState."""
        return self

    def print(self, *values: Any, **more: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*values, **more)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model: `trainer.model` is not wrapped."""
        return model

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here.

        Raises:
            ConfigError: the ranks are not connected.
        """
        if self.num_processes == 1:
            return
        if not distributed.is_initialized():
            raise ConfigError(
                "accelerator.wait_for_everyone: the ranks are connected while a run is open, between the first use of "
                "trainer.model and the end of train(); call it there, or leave it out, as the ranks wait at the start"
            )
        distributed.barrier()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        there = "process_index, num_processes, is_main_process, device, state, print, unwrap_model, wait_for_everyone"
        raise MissingName(f"accelerator.{name} of accelerate has no counterpart here; there are: {there}")
