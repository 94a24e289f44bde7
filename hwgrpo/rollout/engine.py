"""The protocol of a rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling


class Engine(Protocol):
    """A sampler of responses with some version of the policy's weights.

    A class of engines may have further methods, for the requests of `rollout.workflow`, which differ in n, limit of
    tokens and stop strings:

    - `generate_each(batch, samplings)`: `generate` with settings for each prompt. The requests of a round are then
      sampled at once.
    - `open_session(longest, room, group_timeout)`: a `Session`, in which a request may continue an earlier one, and may
      come while others are sampled.
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


@dataclass(frozen=True)
class TurnRequest:
    """Responses that a session is asked for."""

    prompt: Prompt
    """Its token ids are all that the model reads, earlier turns included."""
    sampling: Sampling
    kept: bool = False
    """Whether a further request may continue one of the responses, so that keys and values are worth keeping."""
    continues: tuple[int, int] | None = None
    """Number of an earlier request, and index of the response that the prompt continues; None: it continues none."""


class Session(Protocol):
    """Requests of one `generate` with workflows, with the keys and values of their earlier turns.

    Kept keys and values save computation and change no token: a session may drop them at any time. With
    `rollout.partial` they may be those of older weights, as they are within a response.

    A session whose requests are sampled elsewhere may have a further method `notify(on_end)`: it calls `on_end`, in any
    thread, whenever a request has ended. `advance` then waits for none: it returns those that have ended.

    Example:
        numbers = session.submit(requests)
        while session.busy: ended = session.advance()
        completions = session.take(numbers)
    """

    @property
    def busy(self) -> bool:
        """Whether a submitted request has not ended."""
        ...

    def submit(self, requests: Sequence[TurnRequest]) -> list[int]:
        """Queue requests; return the number of each."""
        ...

    def advance(self) -> list[int]:
        """Sample a few tokens more, or wait for the end of a request that is sampled elsewhere.

        Returns:
            The numbers of the requests that have ended, or were dropped as too late.
        """
        ...

    def take(self, numbers: Sequence[int]) -> Completions:
        """Return the responses to requests that have ended, ordered by request, then by sample."""
        ...

    def release(self, responses: Sequence[tuple[int, int]]) -> None:
        """Keep some responses, each the number of a request and an index, no longer: no request continues them."""
        ...

    def cancel(self, numbers: Sequence[int]) -> None:
        """End requests that have not ended; their responses are lost."""
        ...

    def close(self) -> None:
        """End all requests and free what is kept. The engine's metrics are then those of the session."""
        ...
