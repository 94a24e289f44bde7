"""Data parallel: every rank holds the whole policy, gradients are averaged (torch DistributedDataParallel)."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hwgrpo.config import Config
from hwgrpo.training.optimizer import build_optimizer
from hwgrpo.training.policy import PolicyModel
from hwgrpo.training.strategies.processes import Processes
from hwgrpo.training.strategies.replicated import Replicated


class Ddp(Processes, Replicated):
    """Train with one process per device under torchrun; see `Strategy` for the methods."""

    def wrap(self, policy: PolicyModel, config: Config) -> None:
        self.policy = policy
        self.optimizer = build_optimizer(policy, config.optim)
        with warnings.catch_warnings():
            # deprecated in torch 2.13; the argument that replaces it does not exist in 2.10, which we support too
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # rotary caches are the same on every rank; broadcasting them would only cost time
            self.module = DistributedDataParallel(policy, broadcast_buffers=False, gradient_as_bucket_view=True)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if last else self.module.no_sync()
