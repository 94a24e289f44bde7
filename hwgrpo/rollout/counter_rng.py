"""Counter-based random numbers: a key per sequence, and the uniforms of its positions.

The uniform of a token is a hash of (seed, prompt uid, sample index, position). Samples therefore depend neither on the
other prompts in the batch, nor on which rows have finished, nor on the number of ranks, and there is no generator state
to save or restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

UNIFORM_BITS = 23
"""Bits of a uniform: (k + 1/2) / 2^23 is exact in fp32 and lies strictly between 0 and 1."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(counter: np.ndarray) -> np.ndarray:
    """Return splitmix64's output for each uint64 state (Steele, Lea, Flood 2014, "Fast splittable PRNGs", fig. 17)."""
    z = counter
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(seed: int, uids: Sequence[str], samples: Sequence[int]) -> np.ndarray:
    """Return one 64-bit key per sequence, from which the uniforms of its positions are derived.

    Args:
        seed: the run's seed, any non-negative integer.
        uids: S prompt uids.
        samples: S sample indices within the group.

    Returns:
        [S] uint64.
    """
    digests = {
        uid: int.from_bytes(hashlib.blake2b(f"{seed}\0{uid}".encode(), digest_size=8).digest(), "little")
        for uid in set(uids)
    }
    prompt = np.array([digests[uid] for uid in uids], dtype=np.uint64)
    # Adding the sample to the prompt's key would make sample 1 of one position equal sample 0 of the next: mix first.
    return _mix(prompt + (np.asarray(samples, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(keys: np.ndarray, start: int | np.ndarray, count: int) -> torch.Tensor:
    """Return the uniforms of positions start .. start + count - 1 of each sequence.

    Args:
        keys: [S] uint64 of `stream_keys`.
        start: first response position; of all sequences, or [S] of each.
        count: number of positions.

    Returns:
        [S, count] fp32 on the CPU, each in (0, 1).
    """
    first = np.asarray(start, dtype=np.uint64).reshape(-1, 1) + np.uint64(1)
    positions = (first + np.arange(count, dtype=np.uint64)) * _GOLDEN
    bits = _mix(keys[:, None] + positions) >> np.uint64(64 - UNIFORM_BITS)
    return torch.from_numpy((bits.astype(np.float32) + np.float32(0.5)) / np.float32(2**UNIFORM_BITS))
