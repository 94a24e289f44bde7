# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""The row kernels in Triton: one source for NVIDIA and AMD, written so that it lowers for Ascend too.

A program takes one row (or, persistent, every n-th row) and walks it in blocks of [LANES,WIDTH] logits. WIDTH
neighbours are one 16-byte access of one thread, so a maximum over them stays inside the thread; each lane keeps its own
running maximum and sums, and lanes meet once, at the end of the row. Inner loops compare no index and mask nothing: the
block that holds the target and the tail of the row are left out of them and done last.

exp is taken to base 2 (one instruction): `scale2` is the scale times log2 e. Scalars that must keep 48 bits in fp64
arrive as two floats, since a float argument of a kernel is fp32.
"""

import triton
import triton.language as tl

from .triton_math import at_least, comparable, expm1, log1p, readable, squash_slope, squashed

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def absorb(m, s, t, u, scale2, ENTROPY: tl.constexpr, FLOOR: tl.constexpr):
    """Fold u [LANES,WIDTH] into the lanes' maxima m, sums s = sum e^(u-m) and t = sum (u-m) e^(u-m), each [LANES].

    m is finite from the start, so that no difference below is -inf - -inf. 2^FLOOR is 0: clamping to it keeps
    0 * -inf out of t.
    """
    m_new = tl.maximum(m, tl.max(u, 1))
    d = (u - m_new[:, None]) * scale2
    shift = (m - m_new) * scale2
    if ENTROPY:
        d = at_least(d, FLOOR)
        shift = at_least(shift, FLOOR)
    e = tl.exp2(d)
    decay = tl.exp2(shift)
    if ENTROPY:
        t = decay * (t + shift * s) + tl.sum(e * d, 1)
    return m_new, decay * s + tl.sum(e, 1), t


@triton.jit
def target_of(targets, row, V, BLOCK: tl.constexpr):
    """Return the row's target (V if it is out of range) and the block to treat apart because it holds the target."""
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    return tl.where(inside, target, V).to(tl.int32), tl.where(inside, target, 0).to(tl.int32) // BLOCK


@triton.jit
def stats_of_row(
    row, logits, targets, row_scale, logprob, entropy, row_max, log_sum, V, stride, squash, scale2,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * WIDTH
    column = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = comparable(column, LANES)
    start = logits + tl.cast(row, tl.int64) * stride * ALIGN
    if row_scale is not None:
        scale2 = scale2 * tl.load(row_scale + row).to(ACC)
    target, home = target_of(targets, row, V, BLOCK)
    place_y = readable(target, V, LANES)
    z_y = tl.load(start + place_y, mask=target < V, other=float("nan")).to(ACC)  # a target out of range makes NaN
    u_y = squashed(z_y, squash, SQUASH)

    # The target's own term stays out of the sums: ln sum = log1p(others + (e_y - 1)) loses nothing when p_y -> 1.
    m = tl.maximum(tl.full((LANES,), LOWEST, ACC), u_y)
    s = tl.zeros((LANES,), ACC)
    t = tl.zeros((LANES,), ACC)
    full = V // BLOCK
    for i in range(full - (home < full).to(tl.int32)):
        block = i + (home <= i).to(tl.int32)
        z = tl.load(start + block * BLOCK + column).to(ACC)
        m, s, t = absorb(m, s, t, squashed(z, squash, SQUASH), scale2, ENTROPY, FLOOR)
    for i in range(1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)):
        first = (home + i * (full - home)) * BLOCK
        z = tl.load(start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
        others = (place < V - first) & (place != target - first)
        u = tl.where(others, squashed(z, squash, SQUASH), float("-inf"))
        m, s, t = absorb(m, s, t, u, scale2, ENTROPY, FLOOR)

    top = tl.max(m, 0)
    shift = at_least((m - top) * scale2, FLOOR)
    decay = tl.exp2(shift)
    d_y = (u_y - top) * scale2
    above_one = tl.sum(decay * s, 0) + expm1(d_y * LN2, TERMS)
    above_one = tl.where(above_one < 0.0, 0.0, above_one)  # below 0 only in a row of nothing but -inf
    ln_sum = log1p(above_one, TERMS)
    tl.store(logprob + row, d_y * LN2 - ln_sum)
    tl.store(row_max + row, top)
    tl.store(log_sum + row, ln_sum)
    if ENTROPY:
        d_y = at_least(d_y, FLOOR)
        weighted = tl.sum(decay * (t + shift * s), 0) + tl.exp2(d_y) * d_y
        tl.store(entropy + row, ln_sum - weighted * LN2 / (1.0 + above_one))


@triton.jit(
    do_not_specialize=["rows", "stride"],
    do_not_specialize_on_alignment=["targets", "row_scale", "logprob", "entropy", "row_max", "log_sum"],
)
def row_stats_kernel(
    logits, targets, row_scale, logprob, entropy, row_max, log_sum, rows, V, stride,
    squash_high, squash_low, scale2_high, scale2_low,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """`definitions.row_stats` of a row per program, or of every `num_programs`-th row."""
    squash = tl.zeros((), ACC) + squash_high + squash_low
    scale2 = tl.zeros((), ACC) + scale2_high + scale2_low
    if PERSISTENT:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            stats_of_row(
                row, logits, targets, row_scale, logprob, entropy, row_max, log_sum, V, stride, squash, scale2,
                SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, LANES, WIDTH,
            )  # fmt: skip
    else:
        stats_of_row(
            tl.program_id(0), logits, targets, row_scale, logprob, entropy, row_max, log_sum, V, stride, squash, scale2,
            SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, LANES, WIDTH,
        )  # fmt: skip


@triton.jit
def grad_block(
    z, top, squash, scale2, constant, slope_h, SQUASH: tl.constexpr, ENTROPY: tl.constexpr, FLOOR: tl.constexpr
):
    """dL/du of entries that are not the target: e_j * (constant + slope_h * d_j)."""
    d = (squashed(z, squash, SQUASH) - top) * scale2
    bracket = constant
    if ENTROPY:
        d = at_least(d, FLOOR)
        bracket = constant + slope_h * d
    return tl.exp2(d) * bracket


@triton.jit
def grad_of_row(
    row, logits, targets, row_scale, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, out, V, stride,
    out_stride, squash, scale, scale2,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * WIDTH
    column = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = comparable(column, LANES)
    start = logits + tl.cast(row, tl.int64) * stride * ALIGN
    out_start = out + tl.cast(row, tl.int64) * out_stride * OUT_ALIGN
    target, home = target_of(targets, row, V, BLOCK)
    if row_scale is not None:
        factor = tl.load(row_scale + row).to(ACC)
        scale = scale * factor
        scale2 = scale2 * factor
    top = tl.load(row_max + row).to(ACC)
    lp = tl.load(logprob + row).to(ACC)
    ln_sum = tl.load(log_sum + row).to(ACC)
    minus_g = -tl.load(grad_logprob + row).to(ACC) * scale
    minus_g = tl.where(top > LOWEST, minus_g, 0.0)  # a row of nothing but -inf has no gradient
    inverse_sum = tl.exp(-ln_sum)
    grad_y = minus_g * expm1(lp, TERMS)
    constant = minus_g * inverse_sum
    slope_h = constant
    if ENTROPY:
        h = tl.load(entropy + row).to(ACC)
        minus_g_h = -tl.load(grad_entropy + row).to(ACC) * scale
        minus_g_h = tl.where(top > LOWEST, minus_g_h, 0.0)
        safe = at_least(lp, FLOOR)
        grad_y += minus_g_h * tl.exp(safe) * (safe + h)
        constant += minus_g_h * inverse_sum * (h - ln_sum)
        slope_h = minus_g_h * inverse_sum * LN2

    full = V // BLOCK
    for i in range(full - (home < full).to(tl.int32)):
        block = i + (home <= i).to(tl.int32)
        z = tl.load(start + block * BLOCK + column).to(ACC)
        grad = grad_block(z, top, squash, scale2, constant, slope_h, SQUASH, ENTROPY, FLOOR)
        if SQUASH:
            grad = grad * squash_slope(z, squash)
        tl.store(out_start + block * BLOCK + column, grad.to(out.dtype.element_ty))
    for i in range(1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)):
        first = (home + i * (full - home)) * BLOCK
        z = tl.load(start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
        grad = grad_block(z, top, squash, scale2, constant, slope_h, SQUASH, ENTROPY, FLOOR)
        grad = tl.where(place == target - first, grad_y, grad)
        if SQUASH:
            grad = grad * squash_slope(z, squash)
        tl.store(out_start + first + column, grad.to(out.dtype.element_ty), mask=column < V - first)


@triton.jit(
    do_not_specialize=["rows", "stride", "out_stride"],
    do_not_specialize_on_alignment=[
        "targets", "row_scale", "logprob", "entropy", "row_max", "log_sum", "grad_logprob", "grad_entropy",
    ],
)  # fmt: skip
def row_grad_kernel(
    logits, targets, row_scale, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, out, rows, V, stride,
    out_stride, squash_high, squash_low, scale2_high, scale2_low,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """`definitions.row_grad` of a row per program, or of every `num_programs`-th row; `out` may be `logits`.

    In place is safe because a block is read whole before it is written, and no other block reads it.
    """
    squash = tl.zeros((), ACC) + squash_high + squash_low
    scale2 = tl.zeros((), ACC) + scale2_high + scale2_low
    scale = scale2 * LN2
    if PERSISTENT:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            grad_of_row(
                row, logits, targets, row_scale, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, out,
                V, stride, out_stride, squash, scale, scale2,
                SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, OUT_ALIGN, LANES, WIDTH,
            )  # fmt: skip
    else:
        grad_of_row(
            tl.program_id(0), logits, targets, row_scale, logprob, entropy, row_max, log_sum, grad_logprob,
            grad_entropy, out, V, stride, out_stride, squash, scale, scale2,
            SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, OUT_ALIGN, LANES, WIDTH,
        )  # fmt: skip
