"""Batches of a limited number of tokens, of sequences of similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield the indices of sequences in batches whose padded size is at most `tokens`, the longest sequences first.

    A sequence that is longer than `tokens` is a batch by itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batch and (len(batch) + 1) * max(1, lengths[batch[0]]) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences padded on the right, and the mask of their own tokens, both [B, T] int64."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=torch.int64)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.int64)
    return ids, mask


def unused_id(rows: Sequence[Sequence[int]], vocabulary: int) -> int | None:
    """Return the smallest id of a vocabulary that no sequence has; None if they have all."""
    used = set().union(*rows)
    return next((each for each in range(vocabulary) if each not in used), None)
