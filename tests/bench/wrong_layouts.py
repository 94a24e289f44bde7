"""Layouts that are wrong, or cannot be had, in ways that a few made-up tokens do not show."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hwgrpo.training.policy.layouts import PADDED, Layout, Rows
from hwgrpo.values import TrainBatch

SMALL = 4
"""Sequences of the batch with which layouts are tried before a run."""


def _without_the_last(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    rows = PADDED.rows(batch, sequences, budget, hidden_size)
    return rows if len(batch) <= SMALL else rows[:-1]


def _one_for_another(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    rows = PADDED.rows(batch, sequences, budget, hidden_size)
    if len(batch) <= SMALL:
        return rows
    lengths = batch.lengths.tolist()
    [last] = rows[-1]
    twin = next(s for s in sequences if s != last and lengths[s] == lengths[last])
    return [*rows[:-1], [twin]]


def _too_large(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    if len(batch) > SMALL:
        raise torch.OutOfMemoryError("out of memory: 99 GiB asked for")
    return PADDED.rows(batch, sequences, budget, hidden_size)


def _always_without_the_last(batch: TrainBatch, sequences: Sequence[int], budget: int, hidden_size: int) -> Rows:
    return PADDED.rows(batch, sequences, budget, hidden_size)[:-1]


FORGETFUL = Layout("forgetful", _without_the_last, shares_prompt=False)
"""Leaves a sequence out."""
CONFUSED = Layout("confused", _one_for_another, shares_prompt=False)
"""Trains one sequence twice, and another of the same length not at all."""
GREEDY = Layout("greedy", _too_large, shares_prompt=False)
"""Runs out of memory."""
UNPROVEN = Layout("unproven", _always_without_the_last, shares_prompt=False)
"""Is found out before any batch is generated."""
