"""Several processes of one run: joining them, and moving small values between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from hwgrpo.config import Config
from hwgrpo.config.derived import ranks_per_sequence
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.sequence_group import ALONE, SequenceGroup, join

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed needs to find the other processes; torchrun sets it."""


class Processes:
    """One process per device under torchrun; what all strategies of several ranks have in common.

    Args:
        device: this rank's device.
        comm_backend: the process group's backend, from the device's backend.
        timeout: seconds that a rank waits for the others; None: the library's default.

    Raises:
        ConfigError: the process was not started by torchrun, or another launcher that sets torch's variables.
    """

    name: str
    """The strategy's, for messages."""
    meets_in_passes = True
    record: Mapping[str, Any] = MappingProxyType({})
    sequence_group: SequenceGroup = ALONE

    @classmethod
    def check(cls, config: Config, device: torch.device) -> None:
        """Check that this process and this machine have what the strategy needs.

        Raises:
            ConfigError: they do not.
        """
        cls._check_launched()

    @classmethod
    def _check_launched(cls) -> None:
        if not (dist.is_initialized() or all(name in os.environ for name in RENDEZVOUS)):
            raise ConfigError(
                f"trainer.strategy={cls.name!r} needs one process per device; start it with "
                "`torchrun --nproc-per-node N -m hwgrpo train ...`, or set "
                f"{', '.join(RENDEZVOUS)} in each process, or use trainer.strategy=single"
            )

    def __init__(self, device: torch.device, comm_backend: str, timeout: float | None = None) -> None:
        self._check_launched()
        limit = None if timeout is None else timedelta(seconds=timeout)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            _join(comm_backend, limit)
        self.device = device
        self.comm_backend = comm_backend
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Small CPU values travel over gloo beside the device's own group.
        self._cpu_group: Any = dist.group.WORLD
        if comm_backend != "gloo":
            self._cpu_group = dist.new_group(backend="gloo", timeout=limit)

    def reduce_gradients(self) -> None:
        pass

    def prepare(self, config: Config) -> None:
        self.check(config, self.device)
        tensor = config.trainer.tensor_parallel_size > 1
        timeout = timedelta(seconds=config.trainer.process_group_timeout)
        self.sequence_group = join(ranks_per_sequence(config), self.comm_backend, tensor=tensor, timeout=timeout)

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
            self.sequence_group = ALONE
            dist.destroy_process_group()


def _join(comm_backend: str, timeout: timedelta | None) -> None:
    """Join the process group, in the launcher's store under a name that no earlier start has used.

    torchrun keeps its store when it starts failed processes again (torch 2.13), and the addresses in it that nobody
    listens at any more. On one host all processes count the starts alike, so that the count makes the name.
    """
    started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if started_again == "0" or not one_host:
        dist.init_process_group(comm_backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout or default_pg_timeout))
    store = dist.PrefixStore(f"start {started_again}", store)
    dist.init_process_group(comm_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
