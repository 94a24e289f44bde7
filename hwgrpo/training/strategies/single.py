"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.training.strategies.replicated import Replicated


class Single(Replicated):
    """Train in this process alone; see `Strategy` for the methods."""

    rank = 0
    world_size = 1
    has_collectives_in_passes = False
    sequence_group = SINGLE_RANK
    record: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, device: torch.device, comm_backend: str, timeout: float | None = None) -> None:
        self.device = device

    def prepare(self, config: Config) -> None:
        pass

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        assert weights is None, "it is unsharded on every rank"
        self.set_policy(policy)
        self.optimizer = build_optimizer(policy, config.optim, offload=config.trainer.offload)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def reduce_gradients(self) -> None:
        pass

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(v) for v in values]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def for_thread(self, stopped: Callable[[], None]) -> Single:
        return self

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
