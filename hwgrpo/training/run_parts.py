"""The parts of a run, as the loop finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hwgrpo_backends.device import Device
from transformers import PreTrainedTokenizerBase

from hwgrpo.closing import close_all
from hwgrpo.config import Config
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.observe.custom_metrics import CustomMetrics
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import ResponseSource
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.run_folder import FolderLock
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Sampling


@dataclass
class Run:
    """What a run is made of; `training.build` puts it together."""

    config: Config
    device: Device
    strategy: Strategy
    prompts: PromptSource
    responses: ResponseSource
    """Draws from `prompts` and calls `engine`; both are its own while it runs ahead."""
    engine: Engine
    sampling: Sampling
    rewards: RewardPipeline
    update: PolicyUpdate
    reference: Reference | None
    validation: PromptDataset | None
    observer: Observer
    metrics: CustomMetrics
    watch: Stopwatch
    saver: Saver
    """Writes checkpoints of finished steps."""
    record_kernels: Callable[[], None]
    """Writes which kernels ran to the run's folder."""
    lock: FolderLock | None
    """Holds the run's folder; None on ranks other than the main one."""
    memory: Callable[[], dict[str, float]]
    """Reads the device's memory metrics; empty on devices that keep none."""
    peak: float | None
    """FLOP/s that a device reaches at most in the compute dtype; None where that is not known."""
    tokenizer: PreTrainedTokenizerBase
    """Saved with the final model."""
    start_step: int
    """Steps done already, 0 in a fresh run."""
    total_steps: int
    reported_failures: set[str] = field(default_factory=set)
    """Reward failures that were shown already: a failing function is told of once."""

    def close(self) -> None:
        """End what runs beside the training, and let go of what is held; the process group stays.

        All of it, whatever fails; see `close_all` for which error is raised.
        """
        locks = [] if self.lock is None else [self.lock.close]
        close_all(self.responses.close, self.observer.close, self.engine.close, self.rewards.close, *locks)
