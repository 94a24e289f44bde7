"""What a rollout engine is: the settings of one call, and the protocol that every engine speaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hwgrpo.errors import ConfigError
from hwgrpo.values import Completions, PromptBatch


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Raises:
        ConfigError: a value is out of range.
    """

    n: int
    """Samples per prompt."""
    max_response_tokens: int
    """Longest response, in tokens, the stop token included."""
    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the end-of-sequence ids of tokenizer and generation config."""
    greedy: bool = False
    """Take the likeliest token; temperature and filters are ignored, log-probs are those of the raw logits."""
    seed: int = 0
    """With (prompt uid, sample index, position) it determines every draw."""

    def __post_init__(self) -> None:
        rules = (
            ("n", self.n >= 1, "at least 1"),
            ("max_response_tokens", self.max_response_tokens >= 1, "at least 1"),
            ("temperature", 0 < self.temperature < math.inf, "above 0 (greedy=True for the likeliest token)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1 (0 is off)"),
            ("stop", not isinstance(self.stop, str), "a list of strings, not one string"),
            ("stop", all(self.stop), "a list of strings that are not empty"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "a list of ids of at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
        )
        for key, fulfilled, allowed in rules:
            if not fulfilled:
                raise ConfigError(f"rollout.{key}={getattr(self, key)!r} is out of range: it must be {allowed}")


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
