"""Rows that decode responses of a prompt once as long as they are equal."""

from __future__ import annotations

import numpy as np
import torch

from hwgrpo.rollout.local.decode_rows import Rows


class DistinctRows:
    """B responses over as many rows of another batch as there are distinct ones; see `Rows` for the methods.

    Samples of short answers are often equal, or begin alike. The host reads every token, so this is for CPUs.

    Args:
        rows: not prefilled yet.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._row_of = np.empty(0, dtype=np.int64)
        self._count = 0
        """Rows of the other batch; 0 before it is spread."""
        self._all_distinct = False
        self._vocab = 0

    @property
    def compact_below(self) -> float:
        return self._rows.compact_below if self._all_distinct else 1.0

    def prefill(self) -> torch.Tensor:
        logits = self._rows.prefill()
        self._vocab = logits.shape[-1]
        return logits

    def spread(self, prompt_of: np.ndarray) -> None:
        self._row_of = prompt_of

    def select(self, kept: np.ndarray) -> None:
        self._row_of = self._row_of[kept]

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        first, row_of = np.arange(len(token_B)), np.arange(len(token_B))
        if not self._all_distinct:
            first, row_of = _distinct(self._row_of * self._vocab + token_B.numpy())
        parents = self._row_of[first]
        if self._count == 0:
            self._rows.spread(parents)
        elif not np.array_equal(parents, np.arange(self._count)):
            self._rows.select(parents)
        self._row_of, self._count = row_of, len(first)
        self._all_distinct = len(first) == len(token_B)
        if self._all_distinct:
            return self._rows.step(token_B)
        return self._rows.step(token_B[torch.from_numpy(first)])[torch.from_numpy(row_of)]


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first of each distinct key [N], in order, and the number of each key [B] among them."""
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number]
