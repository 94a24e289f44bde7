# type: ignore  # a language of its own in Python's syntax, checked by Triton's compiler
"""`dequantize_nf4` in Triton: a program takes some bytes and writes two values for each."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nf4_format import BLOCK, TABLE

PAIRS = 1024
"""Bytes per program: with 4 warps 8 of a thread, and two stores of 16 bytes in 16-bit."""


@triton.jit
def dequantize_nf4_kernel(
    packed, scales, table, out, size, PAIRS: tl.constexpr, BYTES_PER_SCALE: tl.constexpr, ACC: tl.constexpr
):
    """Write `size` values of codes."""
    first = tl.program_id(0).to(tl.int64) * PAIRS
    byte = first + tl.arange(0, PAIRS)
    inside = 2 * byte < size
    codes = tl.load(packed + byte, inside, 0).to(tl.int32)
    scale = tl.load(scales + byte // BYTES_PER_SCALE, inside, 0.0).to(ACC)
    high = tl.load(table + (codes >> 4)).to(ACC) * scale
    low = tl.load(table + (codes & 15)).to(ACC) * scale
    place = 2 * first + tl.arange(0, 2 * PAIRS)
    tl.store(out + place, tl.interleave(high, low).to(out.dtype.element_ty), place < size)


def dequantize_nf4(packed: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """See `definitions.dequantize_nf4`."""
    size = out.numel()
    if size:
        wide = tl.float64 if out.dtype == torch.float64 else tl.float32
        with torch.accelerator.device_index(out.device.index):
            dequantize_nf4_kernel[(triton.cdiv(size, 2 * PAIRS),)](
                packed, scales, _table(out.device), out, size, PAIRS, BLOCK // 2, wide
            )
    return out


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, device=device)
