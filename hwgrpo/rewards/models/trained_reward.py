"""A reward whose model is trained during the run: what the steps, checkpoints and the end of a run need of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class TrainedReward(ABC):
    """A reward with a model that each rank holds in full, equal on all.

    Its name is in `VERIFYING_REWARDS` of the catalogue: the settings alone then say which folders a run writes.

    Attributes:
        source: folder or hub name that the model was read from.
        revision: its revision on the hub.
    """

    source: str
    revision: str | None

    @property
    @abstractmethod
    def network(self) -> torch.nn.Module:
        """The model."""

    @abstractmethod
    def collect(self) -> list[Any]:
        """Return what this rank's scored responses said since the last call; it is sent to all ranks."""

    @abstractmethod
    def add(self, ranks: Sequence[Sequence[Any]]) -> None:
        """Add what `collect` returned on all ranks, in an order that does not depend on their number."""

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Return whether the model is trained after a step."""

    @abstractmethod
    def train(self, step: int) -> None:
        """Train the model after a step in which it is due. Ranks then get the weights of rank 0's `network`.

        Raises:
            RunError: a loss or a gradient is not finite.
        """

    @abstractmethod
    def measure_drift(self) -> None:
        """Compare scores with those before `train`."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, as copies."""

    @abstractmethod
    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the tensors of a checkpoint are of this model."""

    @abstractmethod
    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from the tensors of a checkpoint."""

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""
