"""Stages that measure and report a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hwgrpo.agents.agent_metrics import agent_metrics
from hwgrpo.models.vision import ImageEncoder
from hwgrpo.observe.completions import dropped_records, pick_sample
from hwgrpo.observe.custom_metrics import CustomMetrics, over_ranks
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.training.reward_setup import reward_metrics
from hwgrpo.training.run_folder import FolderLock, raise_if_moved
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.step_metrics import failure_notes, sample_metrics, utilisation
from hwgrpo.values import StepMetrics


@dataclass
class SampleMetrics:
    """Measures rewards, advantages and lengths."""

    timed = None
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        samples = state.prompts, state.completions, state.rewards, state.advantages
        state.metrics = sample_metrics(*samples, self.strategy.gather_objects, state.token_advantages) | state.metrics


@dataclass
class MeasureAgents:
    """Measures the turns and calls of trajectories in environments, over ranks."""

    timed = None
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        ranks = self.strategy.gather_objects(state.completions.outcomes)
        state.metrics |= agent_metrics([outcome for outcomes in ranks for outcome in outcomes])


@dataclass
class MeasureImages:
    """Counts the images that were encoded since the last step, by the trainer and the sampler, over ranks."""

    timed = None
    encoders: Sequence[ImageEncoder]
    strategy: Strategy
    last: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.last = self._now()  # startup checks have encoded some

    def __call__(self, state: StepState) -> None:
        before, self.last = self.last, self._now()
        prompts = sum(prompt.images is not None for prompt in state.prompts.prompts)
        counts = self.strategy.sum([prompts, *(now - then for now, then in zip(self.last, before, strict=True))])
        state.metrics |= {
            "images/prompts": counts[0],
            "perf/images_encoded": counts[1],
            "perf/image_bytes_moved": counts[2],
        }

    def _now(self) -> tuple[int, int]:
        return sum(each.encoded for each in self.encoders), sum(each.moved_bytes for each in self.encoders)


@dataclass
class MeasureCustom:
    """Measures what the functions of `observe.metrics` do."""

    timed = None
    metrics: CustomMetrics
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        samples = state.prompts, state.completions, state.rewards, state.advantages
        measured = raise_on_all_ranks(self.strategy, lambda: self.metrics.measure(*samples))
        state.metrics |= over_ranks(self.strategy.gather_objects(measured), state.metrics | state.updated)


@dataclass
class MeasureRewards:
    """Takes the metrics of rewards with state."""

    timed = None
    rewards: RewardPipeline
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        state.metrics |= reward_metrics(self.rewards, self.strategy)


@dataclass
class Report:
    """Adds times, speed and memory to the metrics, and writes metrics, notes and samples."""

    timed = None
    observer: Observer
    strategy: Strategy
    update: PolicyUpdate
    watch: Stopwatch
    peak: float | None
    machine: Callable[[], dict[str, float]]
    lock: FolderLock | None
    reported_failures: set[str] = field(default_factory=set)
    """Reward failures reported before: each kind is reported once."""

    def __call__(self, state: StepState) -> None:
        prompts, completions, rewards = state.prompts, state.completions, state.rewards
        values, times = state.metrics, self.watch.take()
        speed = {"perf/throughput": values["perf/total_num_tokens"] / max(times["timing_s/step"], 1e-9)}
        flops = self.strategy.sum([self.update.flops])[0]
        speed |= utilisation(flops, times["timing_s/update_actor"], self.peak, self.strategy.world_size)
        values = values | state.updated | times | speed | dict(state.generated.metrics) | self.machine()
        raise_if_moved(self.lock, self.strategy)  # before writing to the run's folder
        dropped = [*state.generated.dropped, *dropped_records(prompts, completions)]
        if values.get("rollout/groups_dropped"):
            dropped = [record for records in self.strategy.gather_objects(dropped) for record in records]
        failures = failure_notes(values, dropped, rewards, state.step, self.reported_failures)
        for note in (*state.generated.notes, *state.notes, *failures):
            self.observer.note(note)
        self.observer.step(StepMetrics(state.step, values), pick_sample(state.step, prompts, completions, rewards))
        self.observer.completions(state.step, prompts, completions, rewards, state.advantages, dropped)
