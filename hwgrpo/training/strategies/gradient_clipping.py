"""Gradients clipped to a total norm, of full gradients or of the shards of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def clip_by_norm(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients to a total norm of `max_norm` (0: do not clip); return the norm before."""
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0 and gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def clip_shards_by_norm(
    shards: Sequence[torch.Tensor],
    max_norm: float,
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
    copies: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip gradients to a total norm of `max_norm` (0: do not clip); return the norm over all ranks before.

    Args:
        shards: this rank's shards of the gradients; each element is on one rank only.
        max_norm: largest norm of the full gradient.
        sum_over_ranks: sums a few numbers over the ranks.
        copies: gradients whose elements are also in another rank's shards.
    """
    squared = torch.nn.utils.get_total_norm(shards).double().square()
    norm = torch.tensor(sum_over_ranks([float(squared)])[0], dtype=torch.float64).sqrt().float()
    if max_norm > 0:
        for shard in (*shards, *copies):
            shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(shard.device))
    return norm
