"""The device that a reward model scores on, and its way there and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hwgrpo.rewards.checked_kwargs import Kwargs

PLACES = ("run", "cpu")


class PlacedModel:
    """A model on its device, or there only while it scores.

    Args:
        model: in evaluation mode.
        run_device: the run's device.
        place: "run" or "cpu".
        offload: whether it is on the CPU between batches.
    """

    def __init__(self, model: Any, run_device: torch.device, place: str, offload: bool) -> None:
        self.model: Any = model
        self.device = torch.device("cpu") if place == "cpu" else run_device
        self._offload = offload and self.device.type != "cpu"
        if not self._offload:
            self.model.to(self.device)

    @contextmanager
    def loaded(self) -> Iterator[Any]:
        """Return the model on its device, for inference."""
        if self._offload:
            self.model.to(self.device)
        try:
            with torch.inference_mode():
                yield self.model
        finally:
            if self._offload:
                self.model.to("cpu")

    def close(self) -> None:
        """Free the model."""
        self.model = None


def check_placement(checks: Kwargs, place: str, offload: bool, tokens_per_batch: int, max_length: int | None) -> None:
    """Raise `ConfigError` if a setting of the placement, or a limit of batches and texts, is wrong."""
    checks.choice("place", place, PLACES)
    checks.boolean("offload", offload)
    checks.number("tokens_per_batch", tokens_per_batch, at_least=1, whole=True)
    if max_length is not None:
        checks.number("max_length", max_length, at_least=1, whole=True)
    if offload and place == "cpu":
        raise checks.error("offload", offload, "has no effect with place=cpu: remove one of the two")
