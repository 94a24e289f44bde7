"""The decode ops in Triton: launch arguments of decode_kernels.py. No call waits for the device."""

import math
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from . import decode_kernels, module_triton
from .kernel_launches import Arguments, KernelWork, declare_work, tensor_bytes
from .rows_triton import warp_size

LEAST_TILE = 16
"""Least query heads of a tile: matrix units take no fewer rows. A group of fewer is padded."""
LEAST_SIZE = 16
"""Least head size of a tile, likewise."""

_kernels: Any = decode_kernels


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, offset: Tensor, prompts: Tensor,
    prompt_of: Tensor, prompt_length: Tensor, responses: Tensor, length: Tensor, scaling: float,
) -> Tensor:  # fmt: skip
    """See `decode_definitions.decode_attention`."""
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    (rows, queries, size), heads = query.shape, key.shape[1]
    assert queries % heads == 0
    assert prompts.stride()[3:] == responses.stride()[3:] == (size, 1), "tokens of a cache are neighbours"
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    out = query.new_empty(rows, queries * size)
    padded = max(LEAST_SIZE, _padded(size))
    if rows:
        with torch.accelerator.device_index(query.device.index):
            _kernels.decode_attention_kernel[(rows, heads)](
                query, key, value, cos, sin, offset, prompts, prompt_of, prompt_length, responses, length, out,
                scaling * math.log2(math.e), prompts.shape[3], *query.stride()[:2], *key.stride()[:2],
                *value.stride()[:2], *prompts.stride()[:3], *responses.stride()[:3], G=queries // heads,
                TILE=max(LEAST_TILE, _padded(queries // heads)), SIZE=size, D=padded,
                STAGES=2,
                **tile_of(padded, query.element_size()),
            )  # fmt: skip
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `decode_definitions.swiglu`."""
    return module_triton.swiglu(gate, up)


def tile_of(size: int, itemsize: int) -> dict[str, int]:
    """Return the tokens of a tile of keys, and the warps of a program, that keep the kernel's values in registers.

    Args:
        size: head size of a tile.
        itemsize: bytes per value; products of fp32 are not for matrix units, and need more registers.
    """
    narrow = itemsize == 2 and size <= 128
    return {"N": 64 if narrow else 16, "num_warps": 8 if itemsize > 2 and warp_size() == 32 else 4}


def _padded(size: int) -> int:
    return int(triton.next_power_of_2(size))  # pyright: ignore[reportArgumentType]  (a constexpr in a kernel alone)


def _work_of_decode_attention(launch: Arguments) -> KernelWork:
    """It depends on lengths in memory; here prompts of full width, and responses that fill half of their buffers.

    That is the mean over the steps of responses that fill them, but for a last token. Rows read a shared prompt
    together: it counts once.
    """
    query, key, prompts, responses = (launch[name] for name in ("query", "key", "prompts", "responses"))
    (rows, queries, size), capacity = query.shape, responses.shape[3]
    filled = max(capacity / 2, 1)
    read = tensor_bytes(prompts) + int(tensor_bytes(responses) * (filled - 1) / capacity)
    beside = sum(
        tensor_bytes(launch[name])
        for name in ("query", "key", "value", "offset", "prompt_of", "prompt_length", "length")
    )
    angles = 2 * rows * size * launch["cos"].element_size()
    written = tensor_bytes(launch["out"]) + 2 * tensor_bytes(key)
    flops = 4 * rows * queries * size * (prompts.shape[3] + filled)
    return KernelWork(read + beside + angles + written, int(flops))


declare_work("decode_attention_kernel", _work_of_decode_attention)
