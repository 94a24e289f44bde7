"""Stages of a step: what they hand to each other, and the slots that they stand in."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch

from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.feed.response_source import Batch
from hwgrpo.training.update.advantage_inputs import AdvantageInputs
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch


@dataclass
class StepState:
    """What the stages of one step hand to each other. Reading what no stage has set yet raises AttributeError."""

    step: int
    generated: Batch = field(init=False)
    """The prompts and their responses."""
    temperature: float | None = field(default=None, init=False)
    """At which the responses were sampled, where it changes over the run; None: `rollout.temperature`."""
    greedy: Completions = field(init=False)
    """One greedy response to each prompt, where the estimator reads their rewards."""
    rewards: Rewards = field(init=False)
    """As metrics and records show them: without the KL, also where that is in the reward."""
    inputs: AdvantageInputs = field(init=False)
    """What advantages are computed from."""
    advantages: torch.Tensor = field(init=False)
    """[S] fp32, of each response."""
    token_advantages: torch.Tensor | None = field(default=None, init=False)
    """[R] fp32, of each token; None: every token has that of its response."""
    trained: torch.Tensor = field(init=False)
    """[S] bool: the responses to train on."""
    batch: TrainBatch = field(init=False)
    """The responses to train on, with what their losses need."""
    updated: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the update."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Further metrics of the step; one of the same name in `updated` counts."""
    notes: list[str] = field(default_factory=list, init=False)
    """Lines for the user, after those of `generated`."""

    @property
    def prompts(self) -> PromptBatch:
        """This rank's prompts."""
        return self.generated.prompts

    @property
    def completions(self) -> Completions:
        """The responses to `prompts`."""
        return self.generated.completions


class Stage(Protocol):
    """One piece of a step's work.

    Example:
        >>> class KeepShort:
        ...     timed = "reward"
        ...
        ...     def __call__(self, state: StepState) -> None:
        ...         short = state.completions.lengths <= 100
        ...         state.rewards = replace(state.rewards, valid=state.rewards.valid & short)
    """

    @property
    def timed(self) -> str | None:
        """Its seconds count in the metric `timing_s/<timed>`; None: in `timing_s/step` alone."""
        ...

    def __call__(self, state: StepState) -> None:
        """Do the work: read fields of the state, and set or replace others."""
        ...


@dataclass
class Slot:
    """Stages that run one after another."""

    watch: Stopwatch
    stages: list[Stage]

    def __call__(self, state: StepState) -> None:
        for timed, stages in groupby(self.stages, key=lambda stage: stage.timed):
            with self.watch(timed) if timed else nullcontext():
                for stage in stages:
                    stage(state)


@dataclass(frozen=True)
class Stages:
    """The slots of a step, in their order."""

    collect: Slot
    score: Slot
    advantages: Slot
    log_probs: Slot
    update: Slot
    sync: Slot
    observe: Slot
