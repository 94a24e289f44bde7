"""The interfaces of a step's responses: who collects them, and who says when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hwgrpo_backends.device import Device

from hwgrpo.catalog import RESPONSE_SOURCES
from hwgrpo.config import Config
from hwgrpo.config.schema import RolloutConfig
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.scored_groups import NO_GROUPS, KeptGroups
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import Completions, PromptBatch, Rewards


@dataclass(frozen=True)
class Batch:
    """The prompts of one step on this rank, and their responses."""

    prompts: PromptBatch
    completions: Completions
    metrics: Mapping[str, float]
    """The engine's metrics, and the staleness of the weights."""
    rewards: Rewards | None = None
    """The responses' rewards, where the source needed them; None: the step scores."""
    greedy: Completions | None = None
    """One greedy response to each prompt, where the advantage estimator reads their rewards."""
    sampled_with: tuple[int, int] | None = None
    """Oldest and newest weights that sampled for this step; None: those of `completions`, no kept groups among them."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    dropped: Sequence[Mapping[str, Any]] = ()
    """Records of groups that were dropped for being late and are not in `completions`."""

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest weights of what was sampled for this step."""
        return self.sampled_with or (self.completions.weight_version, self.completions.newest_version)


@dataclass(frozen=True)
class PrefetchedBatch:
    """A finished batch that `next` has not returned yet."""

    batch: Batch
    state: dict[str, Any]
    """Position in the data after it."""
    kept: KeptGroups = NO_GROUPS
    """Groups kept for later steps after it."""


class Collector(Protocol):
    """Draws the prompts of a step and samples responses to them, with the weights that the engine has."""

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange values while they collect, so that all of them collect together."""
        ...

    @property
    def kept(self) -> KeptGroups:
        """Groups kept for later steps."""
        ...

    def collect(self, step: int) -> Batch:
        """Return the batch of a step; steps come in order."""
        ...

    def resample(self, step: int, batch: Batch) -> Batch | None:
        """Return the batch of the same prompts by the engine's present weights; None: it cannot be collected again."""
        ...


class ResponseSource(Protocol):
    """Returns the batches of the steps in order."""

    def next(self, step: int) -> Batch:
        """Return the batch of a step; wait until it is finished."""
        ...

    def update_weights(self, version: int) -> None:
        """Send the policy's current weights, which are `version`, to the engine. All ranks call it together."""
        ...

    def exclusive_engine(self) -> AbstractContextManager[Any]:
        """Return a context in which only the caller uses the engine."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position in the data after the last batch from `next`, as JSON values."""
        ...

    def files(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's checkpoint files: file name -> tensors of responses that are not trained on yet."""
        ...

    def close(self) -> None:
        """Stop generating; prefetched batches are lost."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceParts:
    """Arguments for making a response source."""

    config: Config
    """Checked settings of the run."""
    prompts: PromptSource
    engine: Engine
    """The rollout engine, with the weights of the first step."""
    gate: Gate
    """Gate at which an engine that generates in its own thread pauses for new weights."""
    device: Device
    strategy: Strategy
    rewards: RewardPipeline
    start: int = 0
    """Steps finished before this start."""
    total_steps: int
    dropout: bool = False
    """Whether training passes draw random numbers of torch."""
    prefetched: Sequence[PrefetchedBatch] = ()
    """Batches of the first steps from a checkpoint; `prompts` is positioned after them."""
    kept: KeptGroups = NO_GROUPS
    """Groups kept for later steps before them."""
    state: dict[str, Any] | None = None
    """Position in the data before them; None if there are none."""
    checkpoint: Checkpoint | None = None
    """Checkpoint that the run resumes from."""


def choose_source(rollout: RolloutConfig) -> str:
    """Return the name of the response source: `auto` prefetches where the settings say so."""
    if rollout.source != "auto":
        return rollout.source
    return "prefetch" if rollout.max_staleness else "on_demand"


def make_source(parts: SourceParts) -> ResponseSource:
    """Return the source of responses for the steps after `parts.start`."""
    return RESPONSE_SOURCES.load(choose_source(parts.config.rollout))(parts)
