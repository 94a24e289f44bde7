"""The processes of a run: join the process group, and exchange small values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from hwgrpo.config import Config
from hwgrpo.config.derived import ranks_per_sequence
from hwgrpo.config.schema import RolloutConfig, TrainerConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK, SequenceGroup, join_sequence_group
from hwgrpo.training.strategies import lost_ranks
from hwgrpo.training.strategies.rendezvous import RENDEZVOUS, is_launched, join
from hwgrpo.training.strategies.thread_ranks import ThreadRanks


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
        if not (dist.is_initialized() or is_launched()):
            raise ConfigError(
                f"trainer.strategy={cls.name!r} needs one process per device; start it with "
                "`torchrun --nproc-per-node N -m hwgrpo train ...`, or set "
                f"{', '.join(RENDEZVOUS)} in each process, or use trainer.strategy=single"
            )

    def __init__(self, device: torch.device, comm_backend: str, timeout: float | None = None) -> None:
        self._check_launched()
        limit = self._limit = None if timeout is None else timedelta(seconds=timeout)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            join(comm_backend, limit)
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
        self._check_same(config.trainer, config.rollout)
        tensor = config.trainer.tensor_parallel_size > 1
        timeout = timedelta(seconds=config.trainer.process_group_timeout)
        self.sequence_group = join_sequence_group(
            ranks_per_sequence(config), self.comm_backend, tensor=tensor, timeout=timeout
        )

    def _check_same(self, trainer: TrainerConfig, rollout: RolloutConfig) -> None:
        """Check that all ranks have this strategy and engine: each has resolved settings at `auto` by itself."""
        sync = (trainer.deepspeed if trainer.strategy == "deepspeed" else trainer.fsdp2).sync_every
        settings = self.gather_objects(
            f"trainer.strategy={self.name}, sync_every={sync}, rollout.engine={rollout.engine}, "
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
        )
        if len(set(settings)) > 1:
            chosen = "; ".join(f"rank {settings.index(each)}: {each}" for each in sorted(set(settings)))
            raise ConfigError(
                "devices, packages or checkpoints of the ranks differ, or a package answered one of them too late, and "
                f"so does what auto means ({chosen}): set "
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

    def for_thread(self, stopped: Callable[[], None]) -> ThreadRanks:
        group: Any = dist.new_group(backend="gloo", timeout=self._limit)
        return ThreadRanks(self.rank, self.world_size, group, stopped)

    def barrier(self) -> None:
        dist.barrier(group=self._cpu_group)

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            # The group ends its threads once nothing refers to it. A thread that outlives the interpreter may abort
            # the process: it frees Python objects of a backward pass.
            self.__dict__.pop("module", None)
            self._cpu_group = None
            self.sequence_group = SINGLE_RANK
            lost_ranks.forget()
            dist.destroy_process_group()
