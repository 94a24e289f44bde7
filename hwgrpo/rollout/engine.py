"""The protocol of a rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hwgrpo.values import Completions, PromptBatch, Sampling


class Engine(Protocol):
    """A sampler of responses with some version of the policy's weights.

    A class of engines may have a further method, `generate_each(batch, samplings)`: `generate` with settings for each
    prompt. The requests of a round of `rollout.workflow`, which differ in n, limit of tokens and stop strings, are then
    sampled at once.
    """

    @property
    def notes(self) -> Sequence[str]:
        """Lines about how this engine runs here, printed once at the start."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last `generate`, by full name; empty before it."""
        ...

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample."""
        ...

    def update_weights(self, version: int) -> None:
        """Apply the policy's current weights, whose version is `version`. An engine that sleeps wakes up."""
        ...

    def sleep(self) -> None:
        """Free the memory that only generation needs, until `update_weights`. No rank generates any more."""
        ...

    def health(self) -> bool:
        """Return whether `generate` can be called now."""
        ...

    def close(self) -> None:
        """Free all resources; the engine is not used again."""
        ...
