"""Sampling of a token by the inverse CDF at a uniform, from the tokens that top-k, top-p and min-p keep."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hwgrpo_kernels import Choice, resolve

SUMS_IN_ORDER = ("cpu",)
"""Device types on which a cumulative sum adds terms in order."""

BLOCK = 256
"""Tokens per block sum, where the vocabulary is large or cumulative sums are not in order."""

CHUNK_BYTES = 2**23
"""Logits in fp32 that a CPU reads at a time: a chunk stays in its cache, and its memory is used again by the next."""

FEW_TOKENS = 4096
"""Largest vocabulary for which a CPU uses one cumulative sum: it adds terms in order, blocks many at once."""


def inverse_cdf(probability_SV: torch.Tensor, uniform_S: torch.Tensor) -> torch.Tensor:
    """Return, per row, the first token of positive probability whose cumulative probability exceeds u * total.

    Args:
        probability_SV: [S, V] fp32, not negative; rows need not sum to exactly 1.
        uniform_S: [S] fp32 in (0, 1); 1 would mean the last token of positive probability.

    Returns:
        [S] int64; -1 where the row holds NaN or no positive probability.
    """
    if probability_SV.device.type not in SUMS_IN_ORDER or probability_SV.shape[-1] > FEW_TOKENS:
        return _by_blocks(probability_SV, uniform_S)
    cdf = probability_SV.cumsum(dim=-1)
    total = cdf[:, -1:]
    threshold = uniform_S[:, None] * total
    if bool((threshold < total).all()):
        # Sums in order never decrease, so a binary search finds the first that exceeds. The sum increased there, so its
        # probability is positive.
        return torch.searchsorted(cdf, threshold, right=True)[:, 0]
    return torch.where(total[:, 0] > 0, _first_above(cdf, probability_SV > 0, threshold), -1)


def _by_blocks(probability_SV: torch.Tensor, uniform_S: torch.Tensor) -> torch.Tensor:
    """Return `inverse_cdf` by block sums: find the block, then the token in it, reading the vocabulary once."""
    vocabulary, device = probability_SV.shape[-1], probability_SV.device
    in_blocks = vocabulary // BLOCK * BLOCK
    sums = probability_SV[:, :in_blocks].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    if in_blocks < vocabulary:
        sums = torch.cat([sums, probability_SV[:, in_blocks:].sum(dim=-1, keepdim=True)], dim=-1)
    cdf = _running_sum(sums)
    total = cdf[:, -1:]
    threshold = uniform_S[:, None] * total
    block = _first_above(cdf, sums > 0, threshold).clamp_min(0)[:, None]
    before = torch.nn.functional.pad(cdf, (1, 0)).gather(-1, block)
    index = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = probability_SV.gather(-1, index.clamp_max(vocabulary - 1)).masked_fill(index >= vocabulary, 0.0)
    place = _first_above(before + _running_sum(inside), inside > 0, threshold)
    return torch.where(total[:, 0] > 0, block[:, 0] * BLOCK + place, -1)


def _first_above(cdf: torch.Tensor, positive: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return the first positive entry whose running sum exceeds the threshold, or the last positive one; -1 for none.

    A parallel scan's rounding need not be monotone: it may exceed where nothing was added, and nowhere at the end.
    """
    entry = torch.arange(cdf.shape[-1], device=cdf.device, dtype=torch.int32)
    first = torch.where(positive & (cdf > threshold), entry, cdf.shape[-1]).amin(dim=-1)
    last = torch.where(positive, entry, -1).amax(dim=-1)
    return torch.minimum(first, last).long()


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums over the last dimension; a device's own scan may round differently each time."""
    if not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim=-1)
    shift = 1
    while shift < values.shape[-1]:
        values = values + torch.nn.functional.pad(values[:, :-shift], (shift, 0))
        shift *= 2
    return values


class Drawn(NamedTuple):
    """A token of each of S rows, and what belongs to it, under the names of the columns of `Responses`."""

    tokens: torch.Tensor
    """[S] int64; -1 where the row's logits are not finite."""
    logprobs: torch.Tensor
    """[S] fp32: log-prob under the distribution that the token was drawn from."""
    floors: torch.Tensor | None
    """[S] fp32: log-prob under the full distribution below which tokens were dropped; None without a filter."""


def draw(
    logits_SV: torch.Tensor,
    uniform_S: torch.Tensor | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Drawn:
    """Draw one token per row.

    Args:
        logits_SV: [S, V], any float dtype.
        uniform_S: [S] fp32; None selects the likeliest token, with its log-prob under softmax of the raw logits.
        temperature: divisor of the logits.
        top_k: see `filter_logits`.
        top_p: see `filter_logits`.
        min_p: see `filter_logits`.
    """
    if logits_SV.device.type != "cpu":
        if _resolve("block_sums", logits_SV).name != "torch":
            return _draw_in_kernels(logits_SV, uniform_S, temperature, top_k, top_p, min_p)
        return _draw(logits_SV, uniform_S, temperature, top_k, top_p, min_p)
    rows = max(1, CHUNK_BYTES // (4 * logits_SV.shape[-1]))
    logits = logits_SV.split(rows)
    uniforms = [None] * len(logits) if uniform_S is None else uniform_S.split(rows)
    drawn = [_draw(*each, temperature, top_k, top_p, min_p) for each in zip(logits, uniforms, strict=True)]
    joined: list[Any] = [None if values[0] is None else torch.cat(values) for values in zip(*drawn, strict=True)]
    return Drawn(*joined)


def _draw(
    logits_SV: torch.Tensor, uniform_S: torch.Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> Drawn:
    """Return what `draw` does, of all rows at a time."""
    logits_SV, floor_S = logits_SV.float(), None
    if uniform_S is None:
        probability_SV = logits_SV.softmax(dim=-1)
        token_S = logits_SV.argmax(dim=-1)
    else:
        if temperature != 1.0:
            logits_SV = logits_SV / temperature
        kept_SV = filter_logits(logits_SV, top_k=top_k, top_p=top_p, min_p=min_p)
        floor_S = None if kept_SV is logits_SV else logprob_floor(logits_SV, kept_SV)
        probability_SV = kept_SV.softmax(dim=-1)
        token_S = inverse_cdf(probability_SV, uniform_S)
    logprob_S = probability_SV.gather(-1, token_S.clamp_min(0)[:, None])[:, 0].log()
    # False for NaN, too; no log-prob is +inf
    return Drawn(torch.where(logprob_S > -torch.inf, token_S, -1), logprob_S, floor_S)


def _draw_in_kernels(
    logits_SV: torch.Tensor, uniform_S: torch.Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> Drawn:
    """Return what `draw` does, by the ops `block_sums`, `kept_sums` and `pick`.

    Nothing waits for the device, and shapes depend on the arguments alone: the calls can be part of a device graph.
    """
    floor_S = threshold_S = None
    if uniform_S is None:
        temperature = 1.0
    block_max, block_sum = _resolve("block_sums", logits_SV).function(logits_SV, temperature)
    if uniform_S is not None and (0 < top_k < logits_SV.shape[-1] or top_p < 1.0 or min_p > 0.0):
        block_sum, threshold_S, floor_S = _resolve("kept_sums", logits_SV).function(
            logits_SV, block_max, block_sum, top_k, top_p, min_p, temperature
        )
    tokens, logprobs = _resolve("pick", logits_SV).function(
        logits_SV, block_max, block_sum, uniform_S, threshold_S, temperature
    )
    return Drawn(tokens, logprobs, floor_S)


def _resolve(op: str, logits_SV: torch.Tensor) -> Choice:
    return resolve(op, logits_SV.device.type, logits_SV.dtype, logits_SV.shape[-1])


def filter_logits(logits_SV: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Set the logits outside top-k, then top-p, then min-p to -inf; the order and, but for ties, the sets are those of
    transformers.

    top-k keeps all tokens tied with the k-th; top-p keeps the fewest tokens whose probability (after top-k) reaches p
    (Holtzman et al. 2020, section 3.1), and all tied with the last of them, so that a floor describes the set; min-p
    keeps tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, section 3).

    Args:
        logits_SV: [S, V] fp32, already divided by the temperature.
        top_k: number of tokens; 0 is off.
        top_p: probability; 1 is off.
        min_p: share of the largest probability; 0 is off.

    Returns:
        [S, V] fp32; the logits themselves where no filter applies.
    """
    if 0 < top_k < logits_SV.shape[-1]:
        kth = logits_SV.topk(top_k, dim=-1).values[:, -1:]
        logits_SV = logits_SV.masked_fill(logits_SV < kth, -torch.inf)
    if top_p < 1.0:
        ordered = logits_SV.sort(dim=-1, descending=True).values
        kept = (ordered.softmax(dim=-1).cumsum(dim=-1)[:, :-1] < top_p).sum(dim=-1, keepdim=True)
        logits_SV = logits_SV.masked_fill(logits_SV < ordered.gather(-1, kept), -torch.inf)
    if min_p > 0.0:
        # Compared as exp(difference), not as a difference of logits with log(min_p): this is the definition's rounding.
        relative = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).exp()
        logits_SV = logits_SV.masked_fill(relative < min_p, -torch.inf)
    return logits_SV


def logprob_floor(logits_SV: torch.Tensor, kept_SV: torch.Tensor) -> torch.Tensor:
    """Return the floor [S] fp32: half way between the least likely token kept and the likeliest dropped.

    As a log-prob under the softmax of all logits, it separates the tokens for other roundings of the same logits, too.
    It depends less on an update of the weights than a difference from the logit of one token would.

    Args:
        logits_SV: [S, V] fp32, before the filters.
        kept_SV: [S, V] fp32, after them.

    Returns:
        [S] fp32; -inf where nothing was dropped.
    """
    kept = kept_SV > -torch.inf
    least = logits_SV.masked_fill(~kept, torch.inf).amin(dim=-1)
    dropped = logits_SV.masked_fill(kept, -torch.inf).amax(dim=-1)
    return (least + dropped) / 2 - logits_SV.logsumexp(dim=-1)
