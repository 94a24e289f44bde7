# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""The row kernels in Triton: one source for NVIDIA and AMD, written so that it lowers for Ascend too.

A program takes one row (or, persistent, every n-th row) and walks it in blocks of [LANES,WIDTH] logits. WIDTH
neighbours are one 16-byte access of one thread, so a maximum over them stays inside the thread; each lane keeps its own
running maximum and sums, and lanes meet once, at the end of the row. Inner loops compare no index and mask nothing: the
block that holds the target and the tail of the row are left out of them and done last.

With STAGES = 2 the logits of the next block are read while those of this one are computed. Of a gradient in place these
are other logits than it writes.

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
def carried(gap, shift, s, decay):
    """decay * (gap + shift * s) for gap = sum d e^d: what it becomes when all d gain shift, and all e^d are s in sum.

    What has no weight counts for nothing even if it is infinite.
    """
    gap = tl.where(s == 0.0, 0.0, gap + shift * s)
    return tl.where(decay == 0.0, 0.0, decay * gap)


@triton.jit
def absorb_beside(m, m_new, s, gap, n, r, u, w, scale2, FLOOR: tl.constexpr):
    """Fold reference logits w [LANES,WIDTH] read beside u into the lanes' n, r = sum e^(w-n) and gap, each [LANES].

    gap = sum e^(u-m) ((u-m) - (w-n)), from m and s before u was folded in, and the new m. Summing differences loses
    less than the difference of two sums where policy and reference are near each other.
    """
    n_new = tl.maximum(n, tl.max(w, 1))
    d = at_least((u - m_new[:, None]) * scale2, FLOOR)
    e = tl.exp2(d)
    f = (w - n_new[:, None]) * scale2
    shift = at_least((m - m_new) * scale2, FLOOR)
    ref_shift = (n - n_new) * scale2
    gap = carried(gap, shift - ref_shift, s, tl.exp2(shift)) + tl.sum(tl.where(e == 0.0, 0.0, e * (d - f)), 1)
    return n_new, tl.exp2(ref_shift) * r + tl.sum(tl.exp2(f), 1), gap


@triton.jit
def target_of(targets, row, V, BLOCK: tl.constexpr):
    """Return the row's target (V if it is out of range) and the block to treat apart because it holds the target."""
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    return tl.where(inside, target, V).to(tl.int32), tl.where(inside, target, 0).to(tl.int32) // BLOCK


@triton.jit
def stats_of_row(
    row, logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob,
    ref_max, ref_log_sum, V, stride, ref_stride, squash, scale2,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, REF_ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
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
    if ref_logits is not None:
        ref_start = ref_logits + tl.cast(row, tl.int64) * ref_stride * REF_ALIGN
        w_y = squashed(tl.load(ref_start + place_y, mask=target < V, other=float("nan")).to(ACC), squash, SQUASH)
        n = tl.maximum(tl.full((LANES,), LOWEST, ACC), w_y)
        r = tl.zeros((LANES,), ACC)
        gap = tl.zeros((LANES,), ACC)
    full = V // BLOCK
    for i in tl.range(full - (home < full).to(tl.int32), num_stages=STAGES):
        block = i + (home <= i).to(tl.int32)
        u = squashed(tl.load(start + block * BLOCK + column).to(ACC), squash, SQUASH)
        m_before = m
        s_before = s
        m, s, t = absorb(m, s, t, u, scale2, ENTROPY, FLOOR)
        if ref_logits is not None:
            w = squashed(tl.load(ref_start + block * BLOCK + column).to(ACC), squash, SQUASH)
            n, r, gap = absorb_beside(m_before, m, s_before, gap, n, r, u, w, scale2, FLOOR)
    for i in range(1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)):
        first = (home + i * (full - home)) * BLOCK
        z = tl.load(start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
        others = (place < V - first) & (place != target - first)
        u = tl.where(others, squashed(z, squash, SQUASH), float("-inf"))
        m_before = m
        s_before = s
        m, s, t = absorb(m, s, t, u, scale2, ENTROPY, FLOOR)
        if ref_logits is not None:
            z = tl.load(ref_start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
            w = tl.where(others, squashed(z, squash, SQUASH), float("-inf"))
            n, r, gap = absorb_beside(m_before, m, s_before, gap, n, r, u, w, scale2, FLOOR)

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
    if ref_logits is not None:
        ref_top = tl.max(n, 0)
        ref_shift = (n - ref_top) * scale2
        f_y = (w_y - ref_top) * scale2
        ref_above_one = tl.sum(tl.exp2(ref_shift) * r, 0) + expm1(f_y * LN2, TERMS)
        ref_ln_sum = log1p(tl.where(ref_above_one < 0.0, 0.0, ref_above_one), TERMS)
        lp = (u_y - top) * scale2 * LN2 - ln_sum
        ref_lp = f_y * LN2 - ref_ln_sum
        gap_of_others = tl.sum(carried(gap, shift - ref_shift, s, decay), 0) * LN2
        of_others = (gap_of_others - (ln_sum - ref_ln_sum) * tl.sum(decay * s, 0)) / (1.0 + above_one)
        p_y = tl.exp(lp)
        tl.store(kl + row, of_others + tl.where(p_y == 0.0, 0.0, p_y * (lp - ref_lp)))
        tl.store(kl_others + row, of_others)
        tl.store(ref_logprob + row, ref_lp)
        tl.store(ref_max + row, ref_top)
        tl.store(ref_log_sum + row, ref_ln_sum)


@triton.jit(
    do_not_specialize=["rows", "stride", "ref_stride"],
    do_not_specialize_on_alignment=[
        "targets", "row_scale", "logprob", "entropy", "row_max", "log_sum", "kl", "kl_others", "ref_logprob", "ref_max",
        "ref_log_sum",
    ],
)  # fmt: skip
def row_stats_kernel(
    logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob, ref_max,
    ref_log_sum, rows, V, stride, ref_stride, squash_high, squash_low, scale2_high, scale2_low,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, REF_ALIGN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """`definitions.row_stats`, or row_stats_kl with ref_logits: a row per program, or every `num_programs`-th row."""
    squash = tl.zeros((), ACC) + squash_high + squash_low
    scale2 = tl.zeros((), ACC) + scale2_high + scale2_low
    if PERSISTENT:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            stats_of_row(
                row, logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others,
                ref_logprob, ref_max, ref_log_sum, V, stride, ref_stride, squash, scale2,
                SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, REF_ALIGN, LANES, WIDTH, STAGES,
            )  # fmt: skip
    else:
        stats_of_row(
            tl.program_id(0), logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others,
            ref_logprob, ref_max, ref_log_sum, V, stride, ref_stride, squash, scale2,
            SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, REF_ALIGN, LANES, WIDTH, STAGES,
        )  # fmt: skip


@triton.jit
def grad_block(
    z, top, squash, scale2, constant, slope_h, SQUASH: tl.constexpr, ENTROPY: tl.constexpr, FLOOR: tl.constexpr
):
    """dL/du of entries that are not the target, without a reference: e_j * (constant + slope_h * d_j)."""
    d = (squashed(z, squash, SQUASH) - top) * scale2
    bracket = constant
    if ENTROPY:
        d = at_least(d, FLOOR)
        bracket = constant + slope_h * d
    return tl.exp2(d) * bracket


@triton.jit
def grad_block_beside(
    z, ref_z, top, ref_top, squash, scale2, constant, slope_h, slope_k, SQUASH: tl.constexpr, ENTROPY: tl.constexpr,
    LOWEST: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """dL/du of entries that are not the target: e_j * (constant + slope_h * d_j + slope_k * (d_j - f_j))."""
    d = (squashed(z, squash, SQUASH) - top) * scale2
    f = (squashed(ref_z, squash, SQUASH) - ref_top) * scale2
    bracket = constant + slope_k * (d - at_least(f, LOWEST))  # finite, so that a slope of 0 leaves 0
    if ENTROPY:
        bracket += slope_h * at_least(d, FLOOR)
    e = tl.exp2(d)
    return tl.where(e == 0.0, 0.0, e * bracket)


@triton.jit
def grad_of_row(
    row, logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob,
    ref_max, ref_log_sum, grad_logprob, grad_entropy, grad_kl, out, V, stride, ref_stride, out_stride, squash, scale,
    scale2,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, REF_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
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
    if ref_logits is not None:
        ref_start = ref_logits + tl.cast(row, tl.int64) * ref_stride * REF_ALIGN
        ref_top = tl.load(ref_max + row).to(ACC)
        g_k = tl.load(grad_kl + row).to(ACC) * scale
        p_y = tl.exp(lp)
        # p_y (a_y - kl) with nothing left to cancel when p_y -> 1
        excess = -expm1(lp, TERMS) * (lp - tl.load(ref_logprob + row).to(ACC)) - tl.load(kl_others + row).to(ACC)
        grad_y += tl.where((g_k == 0.0) | (p_y == 0.0), 0.0, g_k * p_y * excess)
        offset = ln_sum - tl.load(ref_log_sum + row).to(ACC) + tl.load(kl + row).to(ACC)
        constant -= tl.where(g_k == 0.0, 0.0, g_k * inverse_sum * offset)
        slope_k = g_k * inverse_sum * LN2

    full = V // BLOCK
    for i in tl.range(full - (home < full).to(tl.int32), num_stages=STAGES):
        block = i + (home <= i).to(tl.int32)
        z = tl.load(start + block * BLOCK + column).to(ACC)
        if ref_logits is not None:
            ref_z = tl.load(ref_start + block * BLOCK + column).to(ACC)
            grad = grad_block_beside(
                z, ref_z, top, ref_top, squash, scale2, constant, slope_h, slope_k, SQUASH, ENTROPY, LOWEST, FLOOR
            )
        else:
            grad = grad_block(z, top, squash, scale2, constant, slope_h, SQUASH, ENTROPY, FLOOR)
        if SQUASH:
            grad = grad * squash_slope(z, squash)
        tl.store(out_start + block * BLOCK + column, grad.to(out.dtype.element_ty))
    for i in range(1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)):
        first = (home + i * (full - home)) * BLOCK
        z = tl.load(start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
        if ref_logits is not None:
            ref_z = tl.load(ref_start + first + column, mask=column < V - first, other=float("-inf")).to(ACC)
            grad = grad_block_beside(
                z, ref_z, top, ref_top, squash, scale2, constant, slope_h, slope_k, SQUASH, ENTROPY, LOWEST, FLOOR
            )
        else:
            grad = grad_block(z, top, squash, scale2, constant, slope_h, SQUASH, ENTROPY, FLOOR)
        grad = tl.where(place == target - first, grad_y, grad)
        if SQUASH:
            grad = grad * squash_slope(z, squash)
        tl.store(out_start + first + column, grad.to(out.dtype.element_ty), mask=column < V - first)


@triton.jit(
    do_not_specialize=["rows", "stride", "ref_stride", "out_stride"],
    do_not_specialize_on_alignment=[
        "targets", "row_scale", "logprob", "entropy", "row_max", "log_sum", "kl", "kl_others", "ref_logprob", "ref_max",
        "ref_log_sum", "grad_logprob", "grad_entropy", "grad_kl",
    ],
)  # fmt: skip
def row_grad_kernel(
    logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others, ref_logprob, ref_max,
    ref_log_sum, grad_logprob, grad_entropy, grad_kl, out, rows, V, stride, ref_stride, out_stride,
    squash_high, squash_low, scale2_high, scale2_low,
    SQUASH: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, LOWEST: tl.constexpr, FLOOR: tl.constexpr,
    TERMS: tl.constexpr, ALIGN: tl.constexpr, REF_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """`definitions.row_grad`, or row_grad_kl with ref_logits: a row per program, or every `num_programs`-th row.

    `out` may be `logits`: that is safe because a block is read whole before it is written, and no other block reads it.
    """
    squash = tl.zeros((), ACC) + squash_high + squash_low
    scale2 = tl.zeros((), ACC) + scale2_high + scale2_low
    scale = scale2 * LN2
    if PERSISTENT:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            grad_of_row(
                row, logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others,
                ref_logprob, ref_max, ref_log_sum, grad_logprob, grad_entropy, grad_kl, out, V, stride, ref_stride,
                out_stride, squash, scale, scale2,
                SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, REF_ALIGN, OUT_ALIGN, LANES, WIDTH, STAGES,
            )  # fmt: skip
    else:
        grad_of_row(
            tl.program_id(0), logits, ref_logits, targets, row_scale, logprob, entropy, row_max, log_sum, kl, kl_others,
            ref_logprob, ref_max, ref_log_sum, grad_logprob, grad_entropy, grad_kl, out, V, stride, ref_stride,
            out_stride, squash, scale, scale2,
            SQUASH, ENTROPY, ACC, LOWEST, FLOOR, TERMS, ALIGN, REF_ALIGN, OUT_ALIGN, LANES, WIDTH, STAGES,
        )  # fmt: skip
