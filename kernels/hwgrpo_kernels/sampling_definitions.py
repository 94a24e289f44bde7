"""The truth of the sampling ops in plain torch, accumulating in fp32 (fp64 for fp64 inputs).

A block is `BLOCK` neighbouring tokens. z is a row's logits over the temperature; top is its maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .matrices import accumulated

BLOCK = 256
"""Tokens per block."""


def block_sums(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Maximum of each block, and the sum of exp(z - maximum).

    Args:
        logits: [N,V] raw logits.
        temperature: divisor of the logits.

    Returns:
        block_max [N,B] and block_sum [N,B] for the B = ceil(V / BLOCK) blocks; -inf and 0 where a block has nothing
        but -inf, NaN and NaN where it has NaN or inf.
    """
    z = _blocks(_scaled(logits, temperature), -torch.inf)
    block_max = z.amax(-1)
    block_sum = (z - block_max.masked_fill(block_max == -torch.inf, 0.0)[..., None]).exp().sum(-1)
    return torch.where(block_sum.isnan(), block_sum, block_max), block_sum


def kept_sums(
    logits: Tensor,
    block_max: Tensor,
    block_sum: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k, then top-p, then min-p; sum each block over the tokens that they keep.

    top-k keeps all tokens tied with the k-th; top-p keeps the fewest tokens whose probability (after top-k) reaches p,
    and all tied with the last of them; min-p keeps tokens at least min_p times as likely as the likeliest.

    Args:
        logits: [N,V] raw logits.
        block_max, block_sum: [N,B] each, from `block_sums`.
        top_k: number of tokens; 0 is off.
        top_p: probability; 1 is off.
        min_p: share of the largest probability; 0 is off.
        temperature: divisor of the logits.

    Returns:
        kept_sum [N,B], the sum of exp(z - block_max) over the kept tokens; threshold [N], the least z kept; floor [N],
        half way from there to the largest z dropped, less ln sum exp z; -inf where nothing is dropped. A row without a
        finite maximum has sums of no meaning, the threshold inf and the floor -inf.
    """
    z = _scaled(logits, temperature)
    kept = z > -torch.inf
    if 0 < top_k < z.shape[1]:
        kept &= z >= z.topk(top_k, 1).values[:, -1:]
    if top_p < 1.0:
        ordered = z.masked_fill(~kept, -torch.inf).sort(1, descending=True).values
        last = (ordered.softmax(1).cumsum(1)[:, :-1] < top_p).sum(1, keepdim=True)
        kept &= z >= ordered.gather(1, last)
    top = z.amax(1, keepdim=True)
    if min_p > 0.0:
        kept &= (z - top).exp() >= min_p
    blocks = (_blocks(z, -torch.inf) - block_max[..., None]).exp()
    kept_sum = blocks.masked_fill(~_blocks(kept, False), 0.0).sum(-1)
    least = z.masked_fill(~kept, torch.inf).amin(1)
    dropped = z.masked_fill(kept, -torch.inf).amax(1)
    alive = top[:, 0].isfinite()
    # as differences from the top: their rounding is not that of a common offset
    floor = (least - top[:, 0] + (dropped - top[:, 0])) / 2 - (z - top).logsumexp(1)
    return kept_sum, torch.where(alive, least, torch.inf), torch.where(alive, floor, -torch.inf)


def pick(
    logits: Tensor,
    block_max: Tensor,
    block_sum: Tensor,
    uniform: Tensor | None,
    threshold: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Draw a token per row: the first whose cumulative probability exceeds the row's uniform.

    Args:
        logits: [N,V] raw logits.
        block_max, block_sum: [N,B] each, from `block_sums`; the latter from `kept_sums` with a threshold.
        uniform: [N] fp32 in (0, 1); None selects the first maximum.
        threshold: [N], the least z that has a probability; None: all have.
        temperature: divisor of the logits.

    Returns:
        token [N] int64 and its log-prob [N] among the tokens that have a probability; -1 and -inf where the row has NaN
        or no finite maximum.
    """
    z = _scaled(logits, temperature)
    top = z.amax(1)
    alive = top.isfinite()
    z = z.masked_fill(~alive[:, None], 0.0)
    if threshold is not None:
        z = z.masked_fill(alive[:, None] & (z < threshold[:, None]), -torch.inf)
    probability = z.softmax(1)
    if uniform is None:
        token = z.argmax(1)
    else:
        cdf = probability.cumsum(1)
        level = uniform.to(cdf.dtype)[:, None] * cdf[:, -1:]
        place = torch.arange(z.shape[1], device=z.device)
        first = torch.where((probability > 0) & (cdf > level), place, z.shape[1]).amin(1)
        token = torch.minimum(first, torch.where(probability > 0, place, 0).amax(1))
    logprob = z.log_softmax(1).gather(1, token[:, None])[:, 0]
    return torch.where(alive, token, -1), torch.where(alive, logprob, -torch.inf)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return z [N,V]."""
    return logits.to(accumulated(logits.dtype)) / temperature


def _blocks(values: Tensor, fill: float | bool) -> Tensor:
    """Return [N,V] as [N,B,BLOCK], filled up."""
    return F.pad(values, (0, -values.shape[1] % BLOCK), value=fill).unflatten(1, (-1, BLOCK))
