# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""Functions of one number for the Triton kernels, from exp and log alone: what every target and the interpreter has."""

import triton
import triton.language as tl


@triton.jit
def expm1(x, TERMS: tl.constexpr):
    """exp(x) - 1 for x <= 0, without cancellation near 0: TERMS terms of the series on (-1/2, 0]."""
    series = x * 0.0 + 1.0
    for k in tl.static_range(TERMS, 1, -1):
        series = 1.0 + (x * (1.0 / k)) * series
    return tl.where(x > -0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x, TERMS: tl.constexpr):
    """ln(1 + x) for x >= 0: below 1/2 as 2 artanh(x / (2 + x)), whose series loses nothing near 0."""
    r = x / (2.0 + x)
    series = x * 0.0
    for k in tl.static_range(TERMS, 0, -1):
        series = series * (r * r) + 1.0 / (2 * k - 1)
    return tl.where(x < 0.5, 2.0 * r * series, tl.log(1.0 + x))


@triton.jit
def at_least(x, FLOOR: tl.constexpr):
    """max(x, FLOOR) that keeps NaN: a NaN logit must show in the result."""
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def squashed(z, squash, SQUASH: tl.constexpr):
    """tanh(squash * z), or z itself without a softcap."""
    if SQUASH:
        e = tl.exp(-2.0 * tl.abs(z * squash))
        size = (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0.0, -size, size)
    return z


@triton.jit
def squash_slope(z, squash):
    """d tanh(squash * z) / dz = squash / cosh^2, without the cancellation of 1 - tanh^2 where it saturates."""
    e = tl.exp(-2.0 * tl.abs(z * squash))
    return squash * (4.0 * e) / ((1.0 + e) * (1.0 + e))


@triton.jit
def comparable(index, LANES: tl.constexpr):
    """Return indices to compare in a block: in fp32 where one lane means an Ascend vector unit; exact up to 2^24.

    Such a unit compares integers one by one. Masks of loads and stores stay integers: they become lengths of copies.
    """
    if LANES == 1:
        index = index.to(tl.float32)
    return index


@triton.jit
def readable(index, V, LANES: tl.constexpr):
    """Return where to read a single entry under a mask: inside the row on an Ascend vector unit (one lane), whose
    masked read of one number reads first and masks then.
    """
    if LANES == 1:
        index = tl.minimum(index, V - 1)
    return index
