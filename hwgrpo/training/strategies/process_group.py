"""The processes of a run: join the process group, and exchange small values."""

from __future__ import annotations

import itertools
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
from hwgrpo.launched_ranks import local_world_size
from hwgrpo.training.policy.sequence_group import SINGLE_RANK, SequenceGroup, join_sequence_group

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which torch.distributed finds the other processes; torchrun sets them."""
_runs = itertools.count()
"""Numbers of the process groups that this process joins."""


class Processes:
    """One process per device under torchrun; the base of all strategies with several ranks.

    Args:
        device: this rank's device.
        comm_backend: backend of the process group, from the device's backend.
        timeout: seconds that a rank waits for the others; None: torch's default.

    Raises:
        ConfigError: the process was not started by torchrun, or another launcher that sets torch's variables.
    """

    name: str
    """Name of the strategy, for messages."""
    has_collectives_in_passes = True
    record: Mapping[str, Any] = MappingProxyType({})
    sequence_group: SequenceGroup = SINGLE_RANK

    @classmethod
    def check(cls, config: Config, device: torch.device) -> None:
        """Check that this process and this machine meet the strategy's requirements.

        Raises:
            ConfigError: one is not met.
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
        # Small CPU values use a gloo group in addition to the device's group.
        self._cpu_group: Any = dist.group.WORLD
        if comm_backend != "gloo":
            self._cpu_group = dist.new_group(backend="gloo", timeout=limit)

    def reduce_gradients(self) -> None:
        pass

    def prepare(self, config: Config) -> None:
        self.check(config, self.device)
        self._check_same(config)
        tensor = config.trainer.tensor_parallel_size > 1
        timeout = timedelta(seconds=config.trainer.process_group_timeout)
        self.sequence_group = join_sequence_group(
            ranks_per_sequence(config), self.comm_backend, tensor=tensor, timeout=timeout
        )

    def _check_same(self, config: Config) -> None:
        """Check that all ranks have this strategy and engine: each has resolved settings at `auto` by itself."""
        t, r = config.trainer, config.rollout
        sync = (t.deepspeed if t.strategy == "deepspeed" else t.fsdp2).sync_every
        settings = self.gather_objects(
            f"trainer.strategy={self.name}, sync_every={sync}, rollout.engine={r.engine}, "
            f"rollout.tensor_parallel_size={r.tensor_parallel_size}"
        )
        if len(set(settings)) > 1:
            chosen = "; ".join(f"rank {settings.index(each)}: {each}" for each in sorted(set(settings)))
            raise ConfigError(
                f"devices, packages or checkpoints of the ranks differ, and so does what auto means ({chosen}): set "
                "trainer.strategy, trainer.fsdp2.sync_every or trainer.deepspeed.sync_every, rollout.engine and "
                "rollout.tensor_parallel_size"
            )

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
            # The group ends its threads once nothing refers to it. A thread that outlives the interpreter may abort
            # the process: it frees Python objects of a backward pass.
            self.__dict__.pop("module", None)
            self._cpu_group = None
            self.sequence_group = SINGLE_RANK
            dist.destroy_process_group()


def _join(comm_backend: str, timeout: timedelta | None) -> None:
    """Join the process group, under a prefix in the launcher's store that no earlier start or run used.

    When torchrun restarts failed processes it keeps its store, with addresses that no process listens at any more
    (torch 2.13). On one host all processes have the same restart count, which becomes the prefix. The same holds for a
    further run in the same processes, whose number is in the prefix.
    """
    one_host = local_world_size(0) == int(os.environ["WORLD_SIZE"])
    started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    run = next(_runs)
    if started_again == "0" and run == 0:
        dist.init_process_group(comm_backend, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout or default_pg_timeout))
    store = dist.PrefixStore(f"start {started_again}, run {run}", store)
    dist.init_process_group(comm_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
