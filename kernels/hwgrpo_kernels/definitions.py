"""The truth of each op in plain torch, accumulating in fp32 (fp64 for fp64 inputs), differentiable by autograd.

For one row with z' = scale * row_scale * u, u = tanh(squash * z) or z:
    logprob = z'_y - ln sum_j exp z'_j        entropy = -sum_j p_j ln p_j        p_j = exp(z'_j - ln sum exp z')
and, with r_j the same of reference logits, kl = sum_j p_j (ln p_j - ln r_j).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .logit_map import LogitMap
from .matrices import accumulated
from .nf4_format import BLOCK, TABLE


def _map(logits: Tensor, mapping: LogitMap) -> tuple[Tensor, Tensor]:
    """Return u [N,V] and the factor [N,1] (or a float) that turns it into z'."""
    accumulate = accumulated(logits.dtype)
    u = logits.to(accumulate)
    if mapping.squash:
        u = torch.tanh(u * mapping.squash)
    factor = u.new_full((u.shape[0], 1), mapping.scale)
    return u, factor if mapping.row_scale_N is None else factor * mapping.row_scale_N.to(accumulate)[:, None]


class _Rows(NamedTuple):
    """Normalised rows: dead [N] (only -inf; treated as uniform), row_max and log_sum [N], ln p_j [N,V]."""

    dead: Tensor
    row_max: Tensor
    log_sum: Tensor
    logprobs: Tensor


def _normalised(logits: Tensor, mapping: LogitMap) -> _Rows:
    u, factor = _map(logits, mapping)
    dead = (u == -torch.inf).all(1)
    u = u.masked_fill(dead[:, None], 0.0)
    row_max = u.amax(1) if u.shape[0] else u.new_empty(0)
    centred = (u - row_max.detach()[:, None]) * factor
    return _Rows(
        dead,
        row_max.masked_fill(dead, torch.finfo(u.dtype).min).detach(),
        centred.logsumexp(1).masked_fill(dead, 0.0).detach(),
        centred.log_softmax(1),
    )


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy and normaliser of each row of logits.

    Args:
        logits: [N,V] raw logits.
        targets: [N] int64 in [0,V).
        scale, squash, row_scale: the fields of `LogitMap`; row_scale is [N] or None.
        with_entropy: without it the entropy is a tensor of no elements.

    Returns:
        logprob [N], entropy [N], row_max [N] = max_j u_j, log_sum [N] = ln sum_j exp(scale * (u_j - row_max)); the
        last two apart, since their sum would lose the digits of log_sum under a large common offset. A row of nothing
        but -inf has logprob -inf, entropy 0, row_max the smallest finite number, log_sum 0, and no gradient.
    """
    row = _normalised(logits, LogitMap(scale, squash, row_scale))
    logprob = row.logprobs.gather(1, targets[:, None])[:, 0]
    probs = row.logprobs.exp()
    entropy = -(probs * row.logprobs.masked_fill(probs == 0, 0.0)).sum(1) if with_entropy else logprob.new_empty(0)
    return (
        torch.where(row.dead, -torch.inf, logprob),
        torch.where(row.dead, 0.0, entropy) if with_entropy else entropy,
        row.row_max,
        row.log_sum,
    )


def row_grad(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Gradient with respect to the raw logits, written to `out`.

    dL/dz'_j = g (1{j=y} - p_j) - g_H p_j (ln p_j + H), then through temperature, softcap and logit scale.

    Args:
        logits: [N,V] raw logits.
        targets: [N].
        logprob, entropy, row_max, log_sum: [N] each, from `row_stats`; entropy None when grad_entropy is.
        grad_logprob, grad_entropy: [N] g and g_H; grad_entropy None means it is zero.
        scale, squash, row_scale: as in `row_stats`.
        out: [N,V], of any floating dtype; may be `logits` itself.

    Returns:
        `out`.
    """
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        stats = row_stats(leaf, targets, scale, squash, row_scale, grad_entropy is not None)
        total = (stats[0] * grad_logprob).masked_fill(grad_logprob == 0, 0.0).sum()
        if grad_entropy is not None:
            total = total + (stats[1] * grad_entropy).sum()
        (grad,) = torch.autograd.grad(total, leaf)
    return out.copy_(grad)


def row_stats_kl(
    logits: Tensor, ref_logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`row_stats` with entropy, and the KL divergence of each row from reference logits of the same shape.

    With r_j the reference's probabilities under the same softcap, scale and temperature, and a_j = ln p_j - ln r_j,
    kl = sum_j p_j a_j and kl_others the same sum without j = y.
    A token that the policy cannot draw (p_j = 0) adds nothing; one that it can draw and the reference cannot makes
    the KL infinite.

    Args:
        logits: [N,V] raw logits of the policy.
        ref_logits: [N,V] raw logits of the reference; no gradient.
        targets, scale, squash, row_scale: as for `row_stats`.

    Returns:
        The four of `row_stats`, then [N] each: kl, kl_others (from which the target's gradient follows without
        cancellation when p_y -> 1), ref_logprob = ln r_y, and row_max and log_sum of the reference.
    """
    mapping, index = LogitMap(scale, squash, row_scale), targets[:, None]
    ref = _normalised(ref_logits.detach(), mapping)
    ref_logprobs = ref.logprobs.masked_fill(ref.dead[:, None], -torch.inf)
    row = _normalised(logits, mapping)
    probs = row.logprobs.exp()
    nothing = (probs == 0) | row.dead[:, None]
    gaps = row.logprobs.masked_fill(nothing, 0.0) - ref_logprobs.masked_fill(nothing, 0.0)
    parts = probs * gaps
    return (
        *row_stats(logits, targets, scale, squash, row_scale, True),
        parts.sum(1),
        parts.detach().scatter(1, index, 0.0).sum(1),
        ref_logprobs.gather(1, index)[:, 0],
        ref.row_max,
        ref.log_sum,
    )


def row_grad_kl(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    kl: Tensor,
    kl_others: Tensor,
    ref_logprob: Tensor,
    ref_max: Tensor,
    ref_log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    grad_kl: Tensor,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> Tensor:
    """`row_grad` with dL/dkl besides: dL/dz'_j gains g_K p_j (a_j - kl).

    Args:
        ref_logits: [N,V], as given to `row_stats_kl`.
        kl, kl_others, ref_logprob, ref_max, ref_log_sum: [N] each, from `row_stats_kl`.
        grad_kl: [N] g_K. Where it is 0 a row has no gradient from its KL, even if that is infinite; an infinite KL
            with another g_K has no meaningful one.
        logits, targets, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, scale, squash, row_scale,
            out: as for `row_grad`.

    Returns:
        `out`.
    """
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        wanted = grad_kl != 0
        beside = torch.where(wanted[:, None], ref_logits, 0.0)
        stats = row_stats_kl(leaf, beside, targets, scale, squash, row_scale)
        total = (stats[0] * grad_logprob).masked_fill(grad_logprob == 0, 0.0).sum()
        total = total + (stats[4] * grad_kl).masked_fill(~wanted, 0.0).sum()
        if grad_entropy is not None:
            total = total + (stats[1] * grad_entropy).sum()
        (grad,) = torch.autograd.grad(total, leaf)
    return out.copy_(grad)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`row_stats` of hidden [N,H] times head [V,H] plus bias [V], through the full [N,V] logits.

    chunk_rows and logits_dtype only affect how it is computed, and are not read here.
    """
    accumulate = accumulated(hidden.dtype)
    logits = hidden.to(accumulate) @ weight.to(accumulate).T
    if bias is not None:
        logits = logits + bias.to(accumulate)
    return row_stats(logits, targets, scale, squash, row_scale, with_entropy)


def dequantize_nf4(packed: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The values of NF4 codes: the table's value of each code times the scale of its block.

    Args:
        packed: [ceil(n / 2)] uint8, two codes per byte, the first in the high half.
        scales: [ceil(n / 64)] fp32, one for 64 values.
        out: [...] of n values, contiguous; written.

    Returns:
        `out`.
    """
    dtype, count = accumulated(out.dtype), out.numel()
    codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count].long()
    scale_of = scales.to(dtype).repeat_interleave(BLOCK)[:count]
    return out.copy_((out.new_tensor(TABLE, dtype=dtype)[codes] * scale_of).view(out.shape))
