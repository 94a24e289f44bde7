# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""The sampling kernels in Triton: sums by block, a search for the tokens that filters keep, and the draw.

z is a logit over the temperature, as torch rounds it. All sums have a fixed order, so that a row's results depend on
nothing but the row. A search bisects over the integers that order the logits as fp32 does: `place` of a value is its
number among those of its dtype.
"""

import triton
import triton.language as tl


@triton.jit
def scaled(x, temperature, DIVIDE: tl.constexpr):
    """x / temperature, rounded correctly: tokens that tie must tie everywhere."""
    if DIVIDE:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def block_sums_kernel(
    logits, block_max, block_sum, temperature, V, stride, blocks,
    BLOCK: tl.constexpr, PER: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """`sampling_definitions.block_sums`: PER blocks of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * PER + tl.arange(0, PER)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + token, token < V, float("-inf")).to(tl.float32)
    z = scaled(x, temperature, DIVIDE)
    m = tl.max(z, 1)
    s = tl.sum(tl.exp(z - tl.where(m == float("-inf"), 0.0, m)[:, None]), 1)
    there = row * blocks + block
    tl.store(block_max + there, tl.where(s == s, m, s), block < blocks)
    tl.store(block_sum + there, s, block < blocks)


@triton.jit
def first_above(entry, weight, cdf, level, SIZE: tl.constexpr):
    """The first entry of positive weight whose running sum exceeds the level, or the last of positive weight.

    A parallel scan's rounding need not be monotone: it may exceed where nothing was added, and nowhere at the end.
    """
    first = tl.min(tl.where((weight > 0.0) & (cdf > level), entry, SIZE), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0.0, entry, -1), 0))


@triton.jit
def pick_kernel(
    logits, block_max, block_sum, uniform, threshold, token, logprob, temperature, V, stride, blocks, uniform_stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """`sampling_definitions.pick`: a row per program. The block by the sums, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    m = tl.load(block_max + row * blocks + i, i < blocks, float("-inf"))
    top = tl.max(m, 0)
    w = tl.load(block_sum + row * blocks + i, i < blocks, 0.0) * tl.exp(m - top)
    cdf = tl.cumsum(w, 0)
    total = tl.sum(tl.where(i == BLOCKS - 1, cdf, 0.0), 0)  # NaN where a block is, or all are -inf
    if uniform is not None:
        level = tl.load(uniform + row * uniform_stride) * total
        block = first_above(i, w, cdf, level, BLOCKS)
    else:
        block = tl.min(tl.where(m == top, i, BLOCKS), 0)
    block = tl.minimum(tl.maximum(block, 0), blocks - 1)
    k = tl.arange(0, BLOCK)
    j = block * BLOCK + k
    z = scaled(tl.load(logits + row * stride + j, j < V, float("-inf")).to(tl.float32), temperature, DIVIDE)
    if uniform is not None:
        e = tl.exp(z - top)
        if threshold is not None:
            e = tl.where(z >= tl.load(threshold + row), e, 0.0)
        before = tl.sum(tl.where(i == block - 1, cdf, 0.0), 0)
        place = tl.maximum(first_above(k, e, before + tl.cumsum(e, 0), level, BLOCK), 0)
    else:
        place = tl.min(tl.where(z == top, k, BLOCK - 1), 0)
    z_t = tl.max(tl.where(k == place, z, float("-inf")), 0)
    alive = (total > 0.0) & (total < float("inf"))
    tl.store(token + row, tl.where(alive, block * BLOCK + place, -1).to(tl.int64))
    tl.store(logprob + row, tl.where(alive, z_t - top - tl.log(total), float("-inf")))


@triton.jit
def place_of(x, SHIFT: tl.constexpr):
    """The number of an fp32 value in order; of the values of a 16-bit dtype where SHIFT drops the bits it lacks.

    -0.0 has that of 0.0, which it equals.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_at(place, SHIFT: tl.constexpr):
    """The fp32 value of a number."""
    image = place << SHIFT
    image = tl.where(image < 0, image | ((1 << SHIFT) - 1), image)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unscaled(z, temperature, side, SHIFT: tl.constexpr, DIVIDE: tl.constexpr):
    """A bound of what z is compared as: in 16 bits of the raw logits, on that side (1 or -1) of z * temperature."""
    if DIVIDE and SHIFT > 0:
        z = z * temperature
        z += side * tl.abs(z) * 1e-6
    return z


@triton.jit
def tally(
    start, maxima, thresholds, lowest, top, temperature, V, blocks,
    BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WAYS: tl.constexpr, SHIFT: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """Count of tokens not below each of WAYS thresholds, and the sum of their exp(z - top): one pass over a row.

    Tiles whose maximum is below `lowest` (of z) hold none of them and are not read.
    """
    PER: tl.constexpr = LANES * WIDTH // BLOCK
    inside = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    count = tl.zeros((LANES, WAYS), tl.int32)
    mass = tl.zeros((LANES, WAYS), tl.float32)
    for tile in range(tl.cdiv(blocks, PER)):
        block = tile * PER + tl.arange(0, PER)
        if tl.max(tl.load(maxima + block, block < blocks, float("-inf")), 0) >= lowest:
            token = tile * LANES * WIDTH + inside
            x = tl.load(start + token, token < V, float("-inf")).to(tl.float32)
            z = scaled(x, temperature, DIVIDE)
            if SHIFT == 0:
                x = z
            above = x[:, :, None] >= thresholds[None, None, :]
            count += tl.sum(above.to(tl.int32), 1)
            mass += tl.sum(tl.where(above, tl.exp(z - top)[:, :, None], 0.0), 1)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def search(
    lo, hi, aim, start, maxima, top, temperature, V, blocks, BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WAYS: tl.constexpr, SHIFT: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """A place in [lo, hi) that separates what the aim needs, and the mass of the tokens not below it.

    The tokens not below `lo` reach the aim (a count or a mass), those not below `hi` do not. A pass compares with WAYS
    places. The end: neighbouring places, or a single token between them.
    """
    way = tl.arange(0, WAYS)
    count_lo = tl.zeros((), tl.int32) + blocks * BLOCK
    count_hi = tl.zeros((), tl.int32)
    mass_lo = tl.zeros((), tl.float32)
    passes = tl.zeros((), tl.int32)
    while (passes == 0) | ((hi - lo > 1) & (count_lo - count_hi > 1)):
        step = tl.maximum((hi - lo + WAYS - 1) // WAYS, 1)
        thresholds = value_at(tl.minimum(lo + way * step, hi).to(tl.int32), SHIFT)
        lowest = value_at(lo.to(tl.int32), SHIFT)
        if SHIFT > 0:
            lowest = scaled(lowest, temperature, DIVIDE)
        count, mass = tally(
            start, maxima, thresholds, lowest, top, temperature, V, blocks, BLOCK, LANES, WIDTH, WAYS, SHIFT, DIVIDE
        )
        if BY_COUNT:
            enough = count >= aim
        else:
            enough = mass >= aim
        n = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
        count_lo = tl.sum(tl.where(way == n, count, 0), 0)
        mass_lo = tl.sum(tl.where(way == n, mass, 0.0), 0)
        lo += n * step
        count_hi = tl.where(lo + step < hi, tl.sum(tl.where(way == n + 1, count, 0), 0), count_hi)
        hi = tl.minimum(lo + step, hi)
        passes += 1
    return lo, mass_lo


@triton.jit
def kth_largest(values, k, top):
    """The k-th largest of some values, none above `top`."""
    image = place_of(values, 0)
    low = place_of(tl.zeros((), tl.float32) - float("inf"), 0).to(tl.int64)
    high = place_of(top, 0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((image >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return value_at(low.to(tl.int32), 0)


@triton.jit(do_not_specialize=["top_k"])
def kept_sums_kernel(
    logits, block_max, block_sum, kept_sum, threshold, floor, temperature, top_k, top_p, tail, min_p, V, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, WAYS: tl.constexpr,
    SHIFT: tl.constexpr, DIVIDE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """`sampling_definitions.kept_sums`: a row per program.

    `tail` is (1 - top_p) / V: tokens whose weight is below that share of the mass are not needed for top_p of it.
    """
    PER: tl.constexpr = LANES * WIDTH // BLOCK
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    maxima = block_max + row * blocks
    i = tl.arange(0, BLOCKS)
    m = tl.load(maxima + i, i < blocks, float("-inf"))
    top = tl.max(m, 0)
    total = tl.sum(tl.load(block_sum + row * blocks + i, i < blocks, 0.0) * tl.exp(m - top), 0)
    lo = place_of(top * 0.0 - float("inf"), SHIFT).to(tl.int64)
    hi = place_of(unscaled(top, temperature, 1, SHIFT, DIVIDE), SHIFT).to(tl.int64) + 1
    mass = total
    if TOP_K:
        if top_k <= blocks:  # so many blocks hold a token that is not below the k-th of their maxima
            bound = unscaled(kth_largest(m, top_k, top), temperature, -1, SHIFT, DIVIDE)
            lo = tl.maximum(lo, place_of(bound, SHIFT).to(tl.int64))
        lo, mass = search(
            lo, hi, top_k, start, maxima, top, temperature, V, blocks, True, BLOCK, LANES, WIDTH, WAYS, SHIFT, DIVIDE
        )
    if TOP_P:
        bound = unscaled(top + tl.log(tail * mass) - 0.001, temperature, -1, SHIFT, DIVIDE)
        lo = tl.maximum(lo, place_of(bound, SHIFT).to(tl.int64))
        lo, mass = search(
            lo, hi, top_p * mass, start, maxima, top, temperature, V, blocks, False, BLOCK, LANES, WIDTH, WAYS, SHIFT,
            DIVIDE,
        )  # fmt: skip
    least_x = value_at(lo.to(tl.int32), SHIFT)
    lowest = least_x
    if SHIFT > 0:
        lowest = scaled(lowest, temperature, DIVIDE)
    if MIN_P:
        lowest = tl.maximum(lowest, top + tl.log(min_p) - 0.001)
    inside = tl.arange(0, PER)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    least = tl.full((PER, BLOCK), float("inf"), tl.float32)
    dropped = tl.full((PER, BLOCK), float("-inf"), tl.float32)
    for tile in range(tl.cdiv(blocks, PER)):
        block = tile * PER + tl.arange(0, PER)
        m_b = tl.load(maxima + block, block < blocks, float("-inf"))
        highest = tl.max(m_b, 0)
        sums = tl.zeros((PER,), tl.float32)
        if highest >= lowest:
            token = tile * PER * BLOCK + inside
            x = tl.load(start + token, token < V, float("-inf")).to(tl.float32)
            z = scaled(x, temperature, DIVIDE)
            if SHIFT == 0:
                x = z
            kept = (x >= least_x) & (z > float("-inf"))
            if MIN_P:
                kept &= tl.exp(z - top) >= min_p
            sums = tl.sum(tl.where(kept, tl.exp(z - m_b[:, None]), 0.0), 1)
            least = tl.minimum(least, tl.where(kept, z, float("inf")))
            dropped = tl.maximum(dropped, tl.where(kept, float("-inf"), z))
        else:
            dropped = tl.maximum(dropped, highest)
        tl.store(kept_sum + row * blocks + block, sums, block < blocks)
    least_z = tl.min(tl.min(least, 1), 0)
    most = tl.max(tl.max(dropped, 1), 0)
    alive = (total > 0.0) & (total < float("inf"))
    tl.store(threshold + row, tl.where(alive, least_z, float("inf")))
    tl.store(floor + row, tl.where(alive, (least_z - top + (most - top)) * 0.5 - tl.log(total), float("-inf")))
