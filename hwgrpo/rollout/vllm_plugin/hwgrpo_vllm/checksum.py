"""Checksums of weights, by which a receiver notices bytes that changed on the way.

A checksum is the sum of a tensor's 32-bit words, each times an odd 64-bit multiplier of its position, modulo 2^64. The
multipliers are pseudo-random, so that flipped bits, exchanged blocks and older values are missed with a probability of
2^-32. All operations are on integers: every device computes the same number, in whatever parts and order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

ROW = 1 << 14
"""Words of a row: the multiplier of a word is that of its column times that of its row."""
HOST_PASS, DEVICE_PASS = 16, 256
"""Rows that are converted to 64 bits at a time: as much as fits into a processor's cache, or fills an accelerator."""
GOLDEN, MIX_1, MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class ChecksumError(RuntimeError):
    """A weight has not arrived as it was sent, or without a checksum."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bytes, [] int64 on its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    words = flat.view(torch.int32)
    columns = _columns(words.device)
    rows = words[: len(words) // ROW * ROW].view(-1, ROW)
    last = words[rows.numel() :]
    size = min(len(rows), HOST_PASS if words.device.type == "cpu" else DEVICE_PASS)
    buffer = torch.empty(size, ROW, dtype=torch.int64, device=words.device)
    parts = rows.split(size) if size else ()
    sums = [buffer[: len(part)].copy_(part).mul_(columns).sum(1) for part in parts]
    sums.append((last.long() * columns[: len(last)]).sum()[None])
    sums_R = torch.cat(sums)
    return (sums_R * multipliers(ROW, len(sums_R)).to(words.device)).sum()


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the checksums of tensors on one device, in hexadecimal."""
    sums = torch.stack([checksum(tensor) for tensor in tensors]).tolist() if tensors else []
    return [f"{value % (1 << 64):016x}" for value in sums]


def named_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> checksum: the metadata of a safetensors file, by which `check` checks its tensors."""
    return {"format": "pt", **dict(zip(tensors, digests([*tensors.values()]), strict=True))}


def check(names: Sequence[str], tensors: Sequence[torch.Tensor], sent: Sequence[str | None]) -> None:
    """Compare received weights with the checksums that the trainer sent.

    Args:
        names: names of the weights.
        tensors: the weights, on one device.
        sent: their checksums; None where there is none.

    Raises:
        ChecksumError: one has another checksum, or none.
    """
    for name, found, expected in zip(names, digests(tensors), sent, strict=True):
        if expected is None:
            raise ChecksumError(
                f"{name} came without a checksum: the trainer is older than this plugin (hwgrpo_vllm); update it"
            )
        if found != expected:
            raise ChecksumError(
                f"{name} arrived changed: checksum {found}, sent {expected}. If it is so each time, test memory, disk "
                "and network of both hosts, or use another rollout.server.transfer"
            )


def multipliers(first: int, count: int) -> torch.Tensor:
    """Return the multipliers of positions from `first` on, [count] int64: splitmix64's numbers, made odd."""
    # the device is named: a caller may have set another default
    position = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device="cpu")
    mixed = position * GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * MIX_2
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return 64-bit numbers shifted to the right, zeros coming in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    return multipliers(0, ROW).to(device)
