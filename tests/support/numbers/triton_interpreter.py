"""Repairs of Triton's CPU interpreter (3.6 and 3.7).

bf16 it keeps as raw 16-bit integers. Unrepaired, `tl.dot` and every arithmetic operation on bf16 work on bit patterns
without an error, and fp32 -> bf16 drops bits instead of rounding to nearest even. Repaired, products are exact in fp32
and accumulate in fp32 (as the matrix units do), casts round, and arithmetic on unconverted bf16 is refused: our kernels
convert first.

A maximum or minimum of a number and NaN is NaN in the interpreter and the number on a device, unless a kernel asks for
NaN to propagate. Repaired, it is the number, so that a NaN which a device would lose shows in a test.

The last repair is of speed alone: the interpreter replaces triton.language's functions by its own at every call of a
device function, looking through hundreds of names, though the launch has replaced them already. That was half the time.
"""

import inspect
from typing import Any

import numpy as np


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round to bf16, nearest even, and return the bits as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def repair() -> None:
    """Repair the interpreter of this process, once; its tests are in tests/interpreter/test_repairs.py."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "is_repaired", False):
        return
    original_cast, original_dot, original_fp_to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def is_bf16(value):
        return isinstance(value, handle) and value.dtype.scalar == tl.bfloat16

    def cast(self, source, to):
        if is_bf16(source) == (to.scalar == tl.bfloat16):
            return original_cast(self, source, to)
        if is_bf16(source):
            return handle(from_bf16_bits(source.data).astype(interpreter._get_np_dtype(to)), to.scalar)
        return handle(to_bf16_bits(source.data.astype(np.float32)), tl.bfloat16)

    def fp_to_fp(self, source, to, rounding_mode):
        if is_bf16(source) or to.scalar == tl.bfloat16:
            return cast(self, source, to)
        return original_fp_to_fp(self, source, to, rounding_mode)

    def dot(self, a, b, accumulator, *rest):
        if not (is_bf16(a) or is_bf16(b)):
            return original_dot(self, a, b, accumulator, *rest)
        a, b = (from_bf16_bits(each.data) if is_bf16(each) else each.data for each in (a, b))
        product = np.matmul(a, b, dtype=accumulator.data.dtype)
        return handle(product + accumulator.data, accumulator.dtype.scalar)

    def refusing(operation, name):
        def on_bf16(self, *arguments):
            if any(is_bf16(each) for each in arguments):
                raise TypeError(f"{name} on bf16 as it was loaded: convert to the accumulator's type first")
            return operation(self, *arguments)

        return on_bf16

    _replace_builtins_once(interpreter, tl)
    builder.cast_impl = cast
    builder.create_fp_to_fp = fp_to_fp
    builder.create_dot = dot
    builder.binary_op = refusing(builder.binary_op, "arithmetic")
    builder.unary_op = refusing(builder.unary_op, "arithmetic")
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.is_repaired = True


def _replace_builtins_once(interpreter: Any, tl: Any) -> None:
    """Skip the search of a namespace for functions to replace where one known to be replaced still is."""
    search, witness = interpreter._patch_builtin, {}

    def patch_builtin(namespace, *rest):
        if namespace not in witness:
            for name, member in inspect.getmembers(namespace):
                if tl.core.is_builtin(member):
                    witness[namespace] = name
                    break
        elif not tl.core.is_builtin(getattr(namespace, witness[namespace])):
            return
        search(namespace, *rest)

    interpreter._patch_builtin = patch_builtin
