"""`row_stats` and `row_grad` in torch: every device, and the CPU's fast path (few passes, no division per logit)."""

import torch
from torch import Tensor

from .chunks import even_chunks

_BLOCK_BYTES = 5 * 2**19
"""Of the accumulating dtype per block of rows: 4 rows of 152k logits in fp32 took least time, of blocks of 1 to 64."""


def _accumulated(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


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
    accumulate = _accumulated(logits)
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
    """Cut the rows so that on a CPU temporaries stay in its cache, and below where its allocator asks the system."""
    rows = logits.shape[0]
    if logits.device.type != "cpu":
        return [(0, rows)]
    return even_chunks(rows, max(1, _BLOCK_BYTES // (_accumulated(logits).itemsize * logits.shape[1])))


def _cut(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values is None else values[start:stop]


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.row_stats`.

    The target's own term is kept apart from the sum: ln sum = log1p(others + (e_y - 1)) loses nothing when p_y -> 1,
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
        nothing = [logits.new_empty(0, dtype=_accumulated(logits)) for _ in range(4)]
        return nothing[0], nothing[1], nothing[2], nothing[3]
    distance, row_max, _ = _distances(logits, None, scale, squash, row_scale, None)
    index = targets[:, None]
    distance_y = distance.gather(1, index)[:, 0]
    if with_entropy:
        exps = distance.clamp_(min=_smallest_exponent(distance.dtype)).exp()
        weighted = distance.mul_(exps).sum(1)
    else:
        exps, weighted = distance.exp_(), None
    # At least one term is exactly 1 (the maximum), so the sum is >= 1 unless the whole row is -inf.
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
    grad.scatter_(1, targets[:, None], grad_y[:, None])
    if capped is not None:
        grad.mul_(torch.addcmul(torch.full((), squash, dtype=grad.dtype), capped, capped, value=-squash))
    return out if grad is out else out.copy_(grad)
