"""Data parallelism: every rank holds the full policy; gradients are averaged once per update.

torch's DistributedDataParallel averages within the last backward pass. An update here is many passes and one
all-reduce, so little could overlap. Without collectives in the passes, a rank that runs out of memory can repeat its
own passes with smaller micro-batches while the others wait in the all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hwgrpo.config import Config
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.training.strategies.process_group import Processes
from hwgrpo.training.strategies.replicated import Replicated

BUCKET_BYTES = 32 * 2**20
"""Bytes of gradients per all-reduce: enough to be fast, little compared with all gradients."""


class Ddp(Processes, Replicated):
    """Train with one process per device under torchrun; see `Strategy` for the methods."""

    name = "ddp"
    has_collectives_in_passes = False

    def prepare(self, config: Config) -> None:
        super().prepare(config)
        self.has_collectives_in_passes = self.sequence_group.size > 1

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        assert weights is None, "it is unsharded on every rank"
        self.set_policy(policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    dist.broadcast(parameter, src=0)  # each rank draws the initial values of new adapters
        self.optimizer = build_optimizer(policy, config.optim, offload=config.trainer.offload)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        # A parameter that one rank used needs a gradient on all; one that no rank used keeps none.
        used = self.sum([self.gradient(p) is not None for p in parameters])
        gradients = []
        for parameter, count in zip(parameters, used, strict=True):
            if count and self.gradient(parameter) is None:
                self.set_zero_gradient(parameter)
            gradient = self.gradient(parameter)
            if gradient is not None:
                gradients.append(gradient)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).to(self.device)
            dist.all_reduce(flat)
            flat /= self.world_size
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients in buckets of one dtype and about BUCKET_BYTES."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
