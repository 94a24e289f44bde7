"""What Acme's devices compute in a way of their own: one implementation per op, checked by `check_kernel`."""

from __future__ import annotations

import torch
from hwgrpo_kernels import Implementation, Key
from torch import Tensor


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `hwgrpo_kernels.definitions.row_stats` defines, in fp32.

    A real device would call its own fused operator here. A target outside of the vocabulary gives NaN: asking would
    wait for the device.
    """
    u = logits.float()
    u = torch.tanh(u * squash) if squash else u
    row_max = u.amax(1).clamp(min=torch.finfo(u.dtype).min)  # a row of nothing but -inf has a finite maximum
    distance = (u - row_max[:, None]) * scale
    distance = distance if row_scale is None else distance * row_scale.float()[:, None]
    total = distance.exp().sum(1)
    log_sum = torch.where(total == 0, 0.0, total.log())
    logprobs = distance - log_sum[:, None]
    column = targets.clamp(0, logits.shape[1] - 1)
    known = (column == targets) | (total == 0)
    logprob = torch.where(known, logprobs.gather(1, column[:, None])[:, 0], torch.nan)
    if not with_entropy:
        return logprob, logprob.new_empty(0), row_max, log_sum
    probs = logprobs.exp()
    entropy = -(probs * logprobs.masked_fill(probs == 0, 0.0)).sum(1)
    return logprob, entropy, row_max, log_sum


def reason_against(key: Key) -> str | None:
    """Return why these kernels cannot serve `key`, or None."""
    return "sums in fp32, and fp64 was asked for" if key.dtype == torch.float64 else None


IMPLEMENTATIONS = (
    Implementation(
        op="row_stats",
        name="acme",
        load="hwgrpo_acme.kernels:row_stats",
        device_types=frozenset({"acme"}),
        supports=reason_against,
        rank=1,
    ),
)
