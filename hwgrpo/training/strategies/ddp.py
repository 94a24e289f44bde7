"""Data parallel: every rank holds the whole policy, gradients are averaged (torch DistributedDataParallel)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hwgrpo.errors import ConfigError
from hwgrpo.training.policy import PolicyModel
from hwgrpo.training.strategies.strategy import clip_by_norm

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed needs to find the other processes; torchrun sets it."""


class Ddp:
    """Train with one process per device under torchrun; see `Strategy` for the methods.

    Args:
        device: this rank's device.
        comm_backend: the process group's backend, from the device's backend.

    Raises:
        ConfigError: the process was not started by torchrun, or another launcher that sets torch's variables.
    """

    module: nn.Module

    def __init__(self, device: torch.device, comm_backend: str) -> None:
        launched = dist.is_initialized() or all(name in os.environ for name in RENDEZVOUS)
        if not launched:
            raise ConfigError(
                "trainer.strategy='ddp' needs one process per device; start it with "
                "`torchrun --nproc-per-node N -m hwgrpo train ...`, or set "
                f"{', '.join(RENDEZVOUS)} in each process, or use trainer.strategy=single"
            )
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group(comm_backend)
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Small CPU values travel over gloo beside the device's own group.
        self._cpu_group: Any = dist.group.WORLD if comm_backend == "gloo" else dist.new_group(backend="gloo")

    def wrap(self, policy: PolicyModel) -> None:
        with warnings.catch_warnings():
            # deprecated in torch 2.13; the argument that replaces it does not exist in 2.10, which we support too
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # rotary caches are the same on every rank; broadcasting them would only cost time
            self.module = DistributedDataParallel(policy, broadcast_buffers=False, gradient_as_bucket_view=True)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if last else self.module.no_sync()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_by_norm(list(self.module.parameters()), max_norm)

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor([float(v) for v in values], dtype=torch.float64)
        dist.all_reduce(total, group=self._cpu_group)
        return total.tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._cpu_group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self._cpu_group)

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            # The group ends its threads when nobody holds it any more. One that lives on while the interpreter
            # ends may abort the process: it lets go of a backward's Python objects, with no interpreter to take them.
            self.__dict__.pop("module", None)
            self._cpu_group = None
            dist.destroy_process_group()
