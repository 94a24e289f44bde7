"""The parts of a run, as the loop uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hwgrpo_backends.device import Device
from transformers import PreTrainedTokenizerBase

from hwgrpo.config import Config
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.observe.custom_metrics import CustomMetrics
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine
from hwgrpo.support.closing import close_all
from hwgrpo.support.free_cores import FreeCoreThreads
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import ResponseSource
from hwgrpo.training.feed.weight_probes import EngineProbes
from hwgrpo.training.interrupt import Interrupt
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.rollout_guard import RolloutGuard
from hwgrpo.training.run_folder import FolderLock
from hwgrpo.training.stages.capture import StepCapture
from hwgrpo.training.stages.profile import StepProfile
from hwgrpo.training.stages.stage import Stages
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Sampling


@dataclass
class TrainingRun:
    """The parts of a run of any training command: what `loop.run_steps` and `finish` use."""

    config: Config
    device: Device
    strategy: Strategy
    prompts: PromptSource
    update: PolicyUpdate
    validation: PromptDataset | None
    observer: Observer
    watch: Stopwatch
    saver: Saver
    """Writes checkpoints of finished steps."""
    record_kernels: Callable[[], None]
    """Writes the selected kernels to the run's folder."""
    lock: FolderLock | None
    """Lock of the run's folder; None on ranks other than rank 0."""
    machine: Callable[[], dict[str, float]]
    """Returns metrics of the device's memory, if it has any of its own, and of threads that follow the free cores."""
    threads: FreeCoreThreads | None
    """Sets the threads of each step; None: their number is fixed."""
    peak: float | None
    """Peak FLOP/s of a device in the compute dtype; None if unknown."""
    tokenizer: PreTrainedTokenizerBase
    """Saved with the final model."""
    load_model: Callable[[Config], Any]
    """Loads the untrained model into host memory, to save shards in."""
    start_step: int
    """Steps finished before this start, 0 in a new run."""
    total_steps: int
    interrupt: Interrupt = field(default_factory=Interrupt, init=False)
    """Requests to stop the run, one object for loop and `finish`, so that the second ends the run in either."""
    interrupted: bool = field(default=False, init=False)
    """A signal ended the run before its last step."""

    def update_threads(self) -> None:
        """Set the threads of what is computed next, with `trainer.threads=free`."""
        if self.threads is not None and (note := self.threads.update()):
            self.observer.note(note)

    def close(self) -> None:
        """Stop background work and release the run's resources except the process group.

        All are closed, even if one fails; see `close_all` for the error that is raised.
        """
        locks = [] if self.lock is None else [self.lock.close]
        close_all(*self._closing(), *locks)

    def _closing(self) -> list[Callable[[], None]]:
        return [self.observer.close]


@dataclass
class Run(TrainingRun):
    """The parts of a GRPO run, made by `setup.build_run`."""

    responses: ResponseSource
    """Draws from `prompts` and calls `engine`; it owns both while it prefetches."""
    engine: Engine
    engine_sleeps: bool
    """The engine frees its memory while the policy is trained."""
    sampling: Sampling
    rewards: RewardPipeline
    guard: RolloutGuard
    probes: EngineProbes | None
    """Probes of the engine's weights; None where it has none of its own, or is meant to differ."""
    reference: Reference | None
    metrics: CustomMetrics
    capture: StepCapture | None
    """Writes the steps of `trainer.capture_steps`; None: there are none."""
    profile: StepProfile | None
    """Profiles the steps of `trainer.profile_steps`; None: there are none."""
    stages: Stages = field(init=False)
    """The work of a step (`step_stages.build_stages`)."""
    reported_failures: set[str] = field(default_factory=set)
    """Reward failures reported before: each kind is reported once."""

    def _closing(self) -> list[Callable[[], None]]:
        unfinished = [each.close for each in (self.capture, self.profile) if each is not None]
        return [self.responses.close, *super()._closing(), self.engine.close, self.rewards.close, *unfinished]
