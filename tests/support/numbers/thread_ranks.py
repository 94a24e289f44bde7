"""Ranks as threads of this process: strategies that exchange values through a list."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate

T = TypeVar("T")


class ThreadRank(Single):
    """One of `world_size` ranks; gradients are averaged over them as every strategy does."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(torch.device("cpu"), "gloo")
        self.rank, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather_objects(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(timeout=60)
        found = list(self._values)
        self._barrier.wait(timeout=60)  # nobody writes before all have read
        return found

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(map(float, each)) for each in zip(*self.gather_objects(list(values)), strict=True)]

    def reduce_gradients(self) -> None:
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        mine = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]
        for parameter, *grads in zip(parameters, *self.gather_objects(mine), strict=True):
            parameter.grad = torch.stack(grads).mean(0)


def on_ranks(update: PolicyUpdate, world_size: int, work: Callable[[PolicyUpdate], T]) -> list[T]:
    """Run `work` with each rank's update, all at once; return the results in rank order."""
    values: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def run(rank: int) -> T:
        policy = copy.deepcopy(update.policy)
        strategy: Any = ThreadRank(rank, values, barrier)
        strategy.wrap(policy, update.config)
        parts = (update.config, strategy, policy, update.device, update.layout, update.total_updates)
        own = PolicyUpdate(*parts, reference=copy.deepcopy(update.reference))
        try:
            return work(own)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
