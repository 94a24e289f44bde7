"""One process, one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from hwgrpo.training.policy import PolicyModel
from hwgrpo.training.strategies.strategy import clip_by_norm


class Single:
    """Train in this process alone; see `Strategy` for the methods."""

    rank = 0
    world_size = 1
    module: nn.Module

    def __init__(self, device: torch.device, comm_backend: str) -> None:
        self.device = device

    def wrap(self, policy: PolicyModel) -> None:
        self.module = policy

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_by_norm(list(self.module.parameters()), max_norm)

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(v) for v in values]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
