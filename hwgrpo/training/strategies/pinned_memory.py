"""Pinned host memory in few blocks.

PyTorch rounds each pinned allocation up to a power of two (ATen/core/CachingHostAllocator.h, torch 2.13), which may
double the memory of tensors that are allocated one by one. These are views of blocks whose sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNED = 64
"""Bytes that a tensor's first byte is a multiple of, in its block."""

Part = tuple[int, torch.dtype]
"""A tensor to be made: its number of elements, and their dtype."""


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack tensors into blocks, largest tensors first, each into the first block with room.

    Args:
        sizes: bytes of each tensor.

    Returns:
        The bytes of each block, powers of two; for each tensor its block and its first byte there.
    """
    rounded = [ALIGNED * max(1, -(-size // ALIGNED)) for size in sizes]
    left = sum(rounded)
    blocks: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -rounded[index]):
        size = rounded[index]
        room = (block for block, taken in enumerate(used) if taken + size <= blocks[block])
        block = next(room, len(blocks))
        if block == len(blocks):
            # the largest that what is left fills, or one that has room for this tensor
            blocks.append(max(1 << (left.bit_length() - 1), 1 << (size - 1).bit_length()))
            used.append(0)
        places[index] = block, used[block]
        used[block] += size
        left -= size
    return blocks, places


def empty(parts: Sequence[Part]) -> list[torch.Tensor]:
    """Return uninitialized tensors in pinned memory."""
    sizes = [count * dtype.itemsize for count, dtype in parts]
    blocks, places = pack(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in blocks]
    return [
        memory[block][start : start + size].view(dtype)
        for size, (block, start), (_, dtype) in zip(sizes, places, parts, strict=True)
    ]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies [count] in host memory; those from a device are complete after its next synchronization."""
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    # the device copies asynchronously into pinned memory, and several times as fast
    pinned = iter(empty([(tensor.numel(), tensor.dtype) for tensor in on_device]))
    return [
        tensor.clone() if tensor.device.type == "cpu" else next(pinned).copy_(tensor.view(-1), non_blocking=True)
        for tensor in tensors
    ]
