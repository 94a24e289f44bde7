"""Stages that collect a step's responses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hwgrpo.config import Config
from hwgrpo.config.derived import temperature_at
from hwgrpo.rollout.engine import Engine
from hwgrpo.training.feed.response_source import ResponseSource
from hwgrpo.training.feed.weight_probes import EngineProbes
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.values import Sampling


@dataclass
class Collect:
    """Takes the step's prompts and responses from their source."""

    timed = "gen"
    responses: ResponseSource
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        state.generated = raise_on_all_ranks(self.strategy, lambda: self.responses.next(state.step))


@dataclass
class GreedyResponses:
    """Samples a greedy response to each prompt by the engine's weights, unless the source has."""

    timed = "gen"
    responses: ResponseSource
    engine: Engine
    sampling: Sampling
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        if state.generated.greedy is not None:
            state.greedy = state.generated.greedy
            return
        sampling = replace(self.sampling, n=1, greedy=True)
        with self.responses.exclusive_engine():  # a source of the user's may prefetch
            state.greedy = raise_on_all_ranks(self.strategy, lambda: self.engine.generate(state.prompts, sampling))


@dataclass
class SleepEngine:
    """Frees the engine's memory until it gets new weights."""

    timed = "gen"
    engine: Engine
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        raise_on_all_ranks(self.strategy, self.engine.sleep)


@dataclass
class SetTemperature:
    """Sets the temperature at which the responses were sampled and are scored."""

    timed = None
    config: Config
    total_steps: int

    def __call__(self, state: StepState) -> None:
        state.temperature = temperature_at(self.config, state.step, self.total_steps)
        state.metrics["rollout/temperature"] = state.temperature


@dataclass
class ReportProbe:
    """Reports the probe of the weights that sampled the responses, with the first step after it."""

    timed = None
    probes: EngineProbes

    def __call__(self, state: StepState) -> None:
        state.metrics |= self.probes.pop_metrics()
