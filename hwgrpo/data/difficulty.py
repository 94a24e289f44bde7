"""Sampling order that passes over prompts whose responses were all right or all wrong (`data.difficulty`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hwgrpo.data.sampler import PromptSampler

STREAM = 2**33
"""Offset of the random numbers from those of the data order, which have the same seed."""


class DifficultySampler(PromptSampler):
    """Sampler that sets prompts aside by their last mean reward, and returns a share of them.

    Args:
        size, seed, shuffle: as for `PromptSampler`.
        config: the `data.difficulty` settings (`DifficultyConfig`).
    """

    def __init__(self, size: int, seed: int, shuffle: bool, config: Any) -> None:
        super().__init__(size, seed, shuffle)
        self._config = config
        self._aside: set[int] = set()
        self._visits = (-1, np.zeros(0))

    def take(self, k: int) -> list[tuple[int, int]]:
        """Return the next k (epoch, row) pairs; where all rows in a row are set aside, the next is drawn anyway."""
        pairs: list[tuple[int, int]] = []
        passed_over = 0
        while len(pairs) < k:
            [(epoch, row)] = super().take(1)
            if row in self._aside and passed_over < self.size and self._visit(epoch)[row] >= self._config.revisit:
                passed_over += 1
            else:
                pairs.append((epoch, row))
                passed_over = 0
        return pairs

    def report(self, mean_rewards: Mapping[int, float]) -> None:
        """Set rows aside, or take them back, by the mean reward of their latest groups."""
        easy, hard = self._config.easy_threshold, self._config.hard_threshold
        for row, mean in mean_rewards.items():
            if (easy is not None and mean >= easy) or (hard is not None and mean <= hard):
                self._aside.add(row)
            else:
                self._aside.discard(row)

    @property
    def metrics(self) -> dict[str, float]:
        """The share of rows that are set aside."""
        return {"data/set_aside_ratio": len(self._aside) / self.size}

    def state(self) -> dict[str, Any]:
        """Return the sampler's state as JSON-able values."""
        return {**super().state(), "set_aside": sorted(self._aside)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`; see `PromptSampler.restore`."""
        super().restore(state)
        self._aside = set(state.get("set_aside", ()))

    def _visit(self, epoch: int) -> np.ndarray:
        """Return [size] numbers in [0, 1), one per row and epoch."""
        if self._visits[0] != epoch:
            bits = np.random.Philox(key=[self.seed, STREAM + epoch]).random_raw(self.size)
            self._visits = epoch, (bits >> 11) * 2.0**-53
        return self._visits[1]


def make_sampler(size: int, seed: int, config: Any) -> PromptSampler:
    """Return the sampler of the training prompts that the `data` settings (`DataConfig`) select."""
    d = config.difficulty
    if d.easy_threshold is None and d.hard_threshold is None:
        return PromptSampler(size, seed, config.shuffle)
    return DifficultySampler(size, seed, config.shuffle, d)


def epoch_and_row(uid: str) -> tuple[int, int]:
    """Return epoch and row of a training prompt."""
    epoch, row = uid.split(":")
    return int(epoch), int(row)
