"""What a rollout engine is: the settings of one call, and the protocol that every engine speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hwgrpo.values import Completions, PromptBatch, Sampling


class Engine(Protocol):
    """Turns prompts into responses with some version of the policy's weights."""

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how this engine will work here, in words; told once."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last `generate`, by their full names; empty before it."""
        ...

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample."""
        ...

    def update_weights(self, version: int) -> None:
        """Take over the policy's current weights, which are `version`."""
        ...

    def sleep(self) -> None:
        """Give back the memory that only generation needs, until `wake`."""
        ...

    def wake(self) -> None:
        """Make ready for `generate` after `sleep`."""
        ...

    def health(self) -> bool:
        """Return whether `generate` can be called now."""
        ...

    def close(self) -> None:
        """Give back everything; the engine is not used again."""
        ...
