"""Sampling order of prompts: endless, by epochs, and exactly resumable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hwgrpo.errors import ConfigError, DataError


class PromptSampler:
    """Sampler of every row once per epoch, in an order that depends only on (seed, epoch).

    Args:
        size: rows in the dataset.
        seed: `trainer.seed`.
        shuffle: False keeps the order of the file.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        assert size > 0, size
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._permutation(0)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the order; the plain one has none."""
        return {}

    def take(self, k: int) -> list[tuple[int, int]]:
        """Return the next k (epoch, row) pairs; where an epoch ends, the next one begins."""
        pairs: list[tuple[int, int]] = []
        while len(pairs) < k:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation(self.epoch)
            end = min(self.size, self.position + k - len(pairs))
            pairs += [(self.epoch, row) for row in self._order[self.position : end].tolist()]
            self.position = end
        return pairs

    def state(self) -> dict[str, Any]:
        """Return the sampler's state as JSON-able values."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`.

        Raises:
            DataError: the dataset's size differs.
            ConfigError: the seed or `shuffle` differs.
        """
        if state["size"] != self.size:
            raise DataError(
                f"the checkpoint was saved with {state['size']} usable prompts, now there are {self.size}: the data, "
                "data.max_rows, data.max_prompt_tokens or the tokenizer changed; put it back, or set "
                "trainer.resume=never with a fresh output_dir"
            )
        for name, key in (("seed", "trainer.seed"), ("shuffle", "data.shuffle")):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"{key}={getattr(self, name)} is not the checkpoint's {state[name]}, so the data order would "
                    f"change; set {key}={state[name]}, or trainer.resume=never with a fresh output_dir"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, [size] int64."""
        if not self.shuffle:
            return np.arange(self.size)
        # Raw Philox bits are the same in every numpy release; `Generator.permutation` is not promised to be.
        bits = np.random.Philox(key=[self.seed, epoch]).random_raw(self.size)
        return np.argsort(bits, kind="stable")
