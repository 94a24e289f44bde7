"""Sources of a step's responses: the interface, and the source that generates them on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from hwgrpo_backends.device import Device

from hwgrpo.catalog import RESPONSE_SOURCES
from hwgrpo.config import Config
from hwgrpo.config.derived import sampling_of
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.values import Completions, PromptBatch, Sampling


@dataclass(frozen=True)
class Batch:
    """The prompts of one step on this rank, and the responses."""

    prompts: PromptBatch
    completions: Completions
    metrics: Mapping[str, float]
    """The engine's, and how old the weights were."""


@dataclass(frozen=True)
class PrefetchedBatch:
    """A batch that is done and was not handed out."""

    batch: Batch
    state: dict[str, Any]
    """The position in the data after it."""


class ResponseSource(Protocol):
    """Hands out the batches of one step after the other."""

    def next(self, step: int) -> Batch:
        """Return the batch of a step, waiting for it where it is not done."""
        ...

    def update_weights(self, version: int) -> None:
        """Give the engine the policy's current weights, which are `version`. All ranks call it together."""
        ...

    def exclusive_engine(self) -> AbstractContextManager[Any]:
        """Return a context in which the engine is the caller's."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position in the data after the last batch that was handed out, JSON-able."""
        ...

    def prefetched(self) -> list[Batch]:
        """Return the batches that are done and were not handed out, the next first."""
        ...

    def close(self) -> None:
        """End what is under way; batches that were not handed out are lost."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceParts:
    """All that the maker of a response source may need."""

    config: Config
    """Checked settings of the run."""
    prompts: PromptSource
    engine: Engine
    """Has the weights of the first step."""
    gate: Gate
    """Where an engine that generates in a thread of its own makes way for new weights."""
    device: Device
    start: int = 0
    """Steps done already."""
    total_steps: int
    prefetched: Sequence[PrefetchedBatch] = ()
    """Batches of the first steps that a checkpoint held; `prompts` stands after them."""
    state: dict[str, Any] | None = None
    """The position in the data before them; None where there are none."""


def on_demand(parts: SourceParts) -> OnDemand:
    """Return the source that generates a step's responses when they are asked for."""
    return OnDemand(parts.prompts, parts.engine, sampling_of(parts.config))


def choose_source(config: Config) -> str:
    """Return the name of the response source: `auto` prefetches where responses may be stale."""
    wanted = config.rollout.source
    return wanted if wanted != "auto" else "prefetch" if config.rollout.max_staleness else "on_demand"


def make_source(parts: SourceParts) -> ResponseSource:
    """Return where the steps after `parts.start` get their responses from."""
    return RESPONSE_SOURCES.load(choose_source(parts.config))(parts)


@dataclass
class OnDemand:
    """Generates a step's responses when they are asked for, with the newest weights."""

    source: PromptSource
    engine: Engine
    sampling: Sampling

    def next(self, step: int) -> Batch:
        prompts = self.source.next()
        completions = self.engine.generate(prompts, self.sampling)
        return Batch(prompts, completions, dict(self.engine.metrics))

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)

    def exclusive_engine(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def prefetched(self) -> list[Batch]:
        return []

    def close(self) -> None:
        pass
