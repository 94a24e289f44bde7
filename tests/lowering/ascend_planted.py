# type: ignore  # Triton's language
"""Kernels that each do one thing that has no place on an Ascend vector core, to see that it is found.

Imported by triton-ascend's environment alone. Every kernel has the same arguments, so that one call starts them all.
"""

import triton
import triton.language as tl


@triton.jit
def inline_asm(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + i)
    value = tl.inline_asm_elementwise(
        "ex2.approx.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    tl.store(out + i, value)


@triton.jit
def unresolved_function(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def loop_over_single_numbers(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + tl.load(index + i)))


@triton.jit
def compare_of_integer_vectors(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i, tl.where(i == n, 0.0, tl.load(x + i)))


@triton.jit
def vector_of_64bit_integers(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    wide = tl.load(index + i).to(tl.int64) * n
    tl.store(out + i, wide.to(tl.float32))


@triton.jit
def not_for_vector_cores_alone(x, index, out, n, B: tl.constexpr):
    i = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    value = tl.load(x + i)
    tl.store(out + i, tl.dot(value, value))


PLANTED = {
    "inline asm": inline_asm,
    "unresolved function": unresolved_function,
    "loop over single numbers": loop_over_single_numbers,
    "compare of integer vectors": compare_of_integer_vectors,
    "vector of 64-bit integers": vector_of_64bit_integers,
    "not for vector cores alone": not_for_vector_cores_alone,
}
