"""The row ops in torch: every device, and the CPU's fast path (few passes, no division per logit)."""

import torch
from torch import Tensor

from .chunks import even_chunks
from .matrices import accumulated, weighted

_BLOCK_BYTES = 5 * 2**19
"""Of the accumulating dtype per block of rows: 4 rows of 152k logits in fp32 took least time, of blocks of 1 to 64."""


def _smallest_exponent(dtype: torch.dtype) -> float:
    """exp of this is 0 in `dtype`; clamping to it keeps 0 * -inf out of the entropy."""
    return -800.0 if dtype == torch.float64 else -200.0


def _distances(
    logits: Tensor, row_max: Tensor | None, scale: float, squash: float, row_scale: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scale * (u - max u), max u and, under a softcap, u itself, where u = tanh(squash z) or z.

    Subtracting before scaling keeps logits with a common offset of 3e4 exact. A row of nothing but -inf gets the
    smallest finite number as its maximum, so that its distances are -inf and not NaN.
    """
    accumulate = accumulated(logits.dtype)
    u = logits if logits.dtype == accumulate else logits.to(accumulate)
    capped = torch.tanh(u * squash) if squash else None
    if capped is not None:
        u = capped
    if row_max is None:
        row_max = u.amax(1).clamp_(min=torch.finfo(accumulate).min)
    centre = row_max[:, None]
    if u is logits or u is capped:
        distance = torch.sub(u, centre, out=out if out is not None and out.dtype == accumulate else None)
    else:
        distance = u.sub_(centre)
    if scale != 1.0:
        distance.mul_(scale)
    if row_scale is not None:
        distance.mul_(row_scale.to(accumulate)[:, None])
    return distance, row_max, capped


def _blocks(logits: Tensor) -> list[tuple[int, int]]:
    """Cut the rows so that on a CPU temporaries stay in its cache, and below its allocator's limit for system calls."""
    rows = logits.shape[0]
    if logits.device.type != "cpu":
        return [(0, rows)]
    return even_chunks(rows, max(1, _BLOCK_BYTES // (accumulated(logits.dtype).itemsize * logits.shape[1])))


def _columns(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the targets as columns [N,1] of the logits; others as some column."""
    return targets.long().clamp(0, logits.shape[1] - 1)[:, None]


def _cut(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values is None else values[start:stop]


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.row_stats`. A target out of range gives NaN, since asking a device would wait for it.

    The target's own term is kept separate from the sum: ln sum = log1p(others + (e_y - 1)) loses nothing when p_y -> 1,
    where max + ln sum - z_y would have cancelled every digit beyond a margin of 16 nats.
    """
    blocks = _blocks(logits)
    if len(blocks) > 1:
        parts = [
            row_stats(logits[a:b], targets[a:b], scale, squash, _cut(row_scale, a, b), with_entropy) for a, b in blocks
        ]
        logprob, entropy, row_max, log_sum = (torch.cat(each) for each in zip(*parts))
        return logprob, entropy, row_max, log_sum
    if logits.shape[0] == 0:
        nothing = [logits.new_empty(0, dtype=accumulated(logits.dtype)) for _ in range(4)]
        return nothing[0], nothing[1], nothing[2], nothing[3]
    distance, row_max, _ = _distances(logits, None, scale, squash, row_scale, None)
    index = _columns(targets, logits)
    distance_y = distance.gather(1, index)[:, 0].masked_fill_(index[:, 0] != targets, torch.nan)
    if with_entropy:
        exps = distance.clamp_(min=_smallest_exponent(distance.dtype)).exp()
        weighted = distance.mul_(exps).sum(1)
    else:
        exps, weighted = distance.exp_(), None
    # At least one term is exactly 1 (the maximum), so the sum is >= 1 unless the full row is -inf.
    above_one = exps.scatter_(1, index, 0.0).sum(1).add_(distance_y.expm1()).clamp_(min=0.0)
    log_sum = above_one.log1p()
    logprob = distance_y.sub_(log_sum)
    if weighted is None:
        return logprob, logprob.new_empty(0), row_max, log_sum
    return logprob, torch.addcdiv(log_sum, weighted, above_one.add_(1.0), value=-1.0), row_max, log_sum


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
    """See `definitions.row_grad`; `out` may be `logits` itself."""
    blocks = _blocks(logits)
    if len(blocks) > 1:
        for a, b in blocks:
            row_grad(
                logits[a:b], targets[a:b], logprob[a:b], _cut(entropy, a, b), row_max[a:b], log_sum[a:b],
                grad_logprob[a:b], _cut(grad_entropy, a, b), scale, squash, _cut(row_scale, a, b), out[a:b],
            )  # fmt: skip
        return out
    if logits.shape[0] == 0:
        return out
    distance, row_max, capped = _distances(logits, row_max, scale, squash, row_scale, out)
    alive = row_max > torch.finfo(row_max.dtype).min  # False for a row of only -inf, which has no gradient
    factor = alive.to(row_max.dtype).mul_(-scale)
    if row_scale is not None:
        factor.mul_(row_scale)
    minus_g = grad_logprob * factor
    grad_y = torch.expm1(logprob).mul_(minus_g)
    inverse_sum = log_sum.neg().exp_()  # p_j = e_j * inverse_sum, without a division per logit
    if grad_entropy is None:
        grad = distance.exp_().mul_(inverse_sum.mul_(minus_g)[:, None])
    else:
        assert entropy is not None, "an entropy gradient without entropies"
        floor = _smallest_exponent(distance.dtype)
        minus_g_h = grad_entropy * factor
        constant = torch.addcmul(minus_g, minus_g_h, entropy - log_sum).mul_(inverse_sum)
        bracket = torch.addcmul(constant[:, None], distance.clamp_(min=floor), (minus_g_h * inverse_sum)[:, None])
        grad = distance.exp_().mul_(bracket)
        safe = logprob.clamp(min=floor)
        grad_y.add_(safe.exp().mul_(safe + entropy).mul_(minus_g_h))
    grad.scatter_(1, _columns(targets, logits), grad_y[:, None])
    if capped is not None:
        grad.mul_(_slope(capped, squash))
    return out if grad is out else out.copy_(grad)


def row_stats_kl(
    logits: Tensor, ref_logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.row_stats_kl`."""
    blocks = _blocks(logits)
    if len(blocks) > 1:
        parts = [
            row_stats_kl(logits[a:b], ref_logits[a:b], targets[a:b], scale, squash, _cut(row_scale, a, b))
            for a, b in blocks
        ]
        stats, entropy, row_max, log_sum, *rest = (torch.cat(each) for each in zip(*parts))
        kl, kl_others, ref_logprob, ref_max, ref_log_sum = rest
        return stats, entropy, row_max, log_sum, kl, kl_others, ref_logprob, ref_max, ref_log_sum
    logprob, entropy, row_max, log_sum = row_stats(logits, targets, scale, squash, row_scale, True)
    ref_logprob, _, ref_max, ref_log_sum = row_stats(ref_logits, targets, scale, squash, row_scale, False)
    if logits.shape[0] == 0:
        return logprob, entropy, row_max, log_sum, logprob, logprob, ref_logprob, ref_max, ref_log_sum
    mapping = scale, squash, row_scale
    probs, gaps, _ = _probs_and_gaps(logits, ref_logits, row_max, log_sum, ref_max, ref_log_sum, *mapping)
    kl_others = gaps.mul_(probs).masked_fill_(probs == 0, 0.0).scatter_(1, _columns(targets, logits), 0.0).sum(1)
    kl = kl_others + weighted(logprob.exp(), logprob - ref_logprob)
    return logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob, ref_max, ref_log_sum


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
    """See `definitions.row_grad_kl`; `out` may be `logits` itself."""
    blocks = _blocks(logits)
    if len(blocks) > 1:
        for a, b in blocks:
            row_grad_kl(
                logits[a:b], ref_logits[a:b], targets[a:b], logprob[a:b], _cut(entropy, a, b), row_max[a:b],
                log_sum[a:b], kl[a:b], kl_others[a:b], ref_logprob[a:b], ref_max[a:b], ref_log_sum[a:b],
                grad_logprob[a:b], _cut(grad_entropy, a, b), grad_kl[a:b], scale, squash, _cut(row_scale, a, b),
                out[a:b],
            )  # fmt: skip
        return out
    if logits.shape[0] == 0:
        return out
    mapping = scale, squash, row_scale
    grad, gaps, capped = _probs_and_gaps(logits, ref_logits, row_max, log_sum, ref_max, ref_log_sum, *mapping)
    # p_y (a_y - kl) with nothing left to cancel when p_y -> 1
    grad_y = weighted(logprob.exp(), -torch.expm1(logprob) * (logprob - ref_logprob) - kl_others)
    others = gaps.sub_(kl[:, None]).masked_fill_(grad == 0, 0.0)
    grad.mul_(others).scatter_(1, _columns(targets, logits), grad_y[:, None])
    factor = grad_kl * scale if row_scale is None else grad_kl * row_scale * scale
    grad.mul_(factor[:, None]).masked_fill_((factor == 0)[:, None], 0.0)
    if capped is not None:
        grad.mul_(_slope(capped, squash))
    plain = row_grad(
        logits, targets, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, *mapping,
        torch.empty_like(grad),
    )  # fmt: skip
    return out.copy_(grad.add_(plain))


def _probs_and_gaps(
    logits: Tensor, ref_logits: Tensor, row_max: Tensor, log_sum: Tensor, ref_max: Tensor, ref_log_sum: Tensor,
    scale: float, squash: float, row_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return p_j [N,V], a_j = ln p_j - ln r_j [N,V] (NaN where neither can be drawn), and u under a softcap."""
    distance, _, capped = _distances(logits, row_max, scale, squash, row_scale, None)
    ref_distance, _, _ = _distances(ref_logits, ref_max, scale, squash, row_scale, None)
    gaps = torch.sub(distance, ref_distance, out=ref_distance).sub_((log_sum - ref_log_sum)[:, None])
    return distance.exp_().mul_(log_sum.neg().exp_()[:, None]), gaps, capped


def _slope(capped: Tensor, squash: float) -> Tensor:
    """d tanh(squash z) / dz from tanh(squash z)."""
    return torch.addcmul(
        torch.full((), squash, dtype=capped.dtype, device=capped.device), capped, capped, value=-squash
    )
