"""The truth of each op in plain torch, accumulating in fp32 (fp64 for fp64 inputs), differentiable by autograd.

For one row with z' = scale * row_scale * u, u = tanh(squash * z) or z:
    logprob = z'_y - ln sum_j exp z'_j        entropy = -sum_j p_j ln p_j        p_j = exp(z'_j - ln sum exp z')
"""

import torch
from torch import Tensor

from .logit_map import LogitMap


def _map(logits: Tensor, mapping: LogitMap) -> tuple[Tensor, Tensor]:
    """Return u [N,V] and the factor [N,1] (or a float) that turns it into z'."""
    accumulate = torch.float64 if logits.dtype == torch.float64 else torch.float32
    u = logits.to(accumulate)
    if mapping.squash:
        u = torch.tanh(u * mapping.squash)
    factor = u.new_full((u.shape[0], 1), mapping.scale)
    return u, factor if mapping.row_scale_N is None else factor * mapping.row_scale_N.to(accumulate)[:, None]


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
    u, factor = _map(logits, LogitMap(scale, squash, row_scale))
    dead = (u == -torch.inf).all(1)
    u = u.masked_fill(dead[:, None], 0.0)
    row_max = u.amax(1) if u.shape[0] else u.new_empty(0)
    centred = (u - row_max.detach()[:, None]) * factor
    log_sum = centred.logsumexp(1)
    logprobs = centred.log_softmax(1)
    logprob = logprobs.gather(1, targets[:, None])[:, 0]
    probs = logprobs.exp()
    entropy = -(probs * logprobs.masked_fill(probs == 0, 0.0)).sum(1) if with_entropy else logprob.new_empty(0)
    return (
        torch.where(dead, -torch.inf, logprob),
        torch.where(dead, 0.0, entropy) if with_entropy else entropy,
        row_max.masked_fill(dead, torch.finfo(u.dtype).min).detach(),
        log_sum.masked_fill(dead, 0.0).detach(),
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
    """`row_stats` of hidden [N,H] times head [V,H] plus bias [V], through the whole [N,V] logits.

    chunk_rows and logits_dtype say how to compute, not what, and are not read here.
    """
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(accumulate) @ weight.to(accumulate).T
    if bias is not None:
        logits = logits + bias.to(accumulate)
    return row_stats(logits, targets, scale, squash, row_scale, with_entropy)
