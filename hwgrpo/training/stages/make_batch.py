"""Stages that compute advantages and make the batch to train on."""

from __future__ import annotations

from dataclasses import dataclass

from hwgrpo.config import Config
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.advantage_inputs import AdvantageInputs, advantage_inputs
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble


@dataclass
class ScoreBefore:
    """Scores responses with old policy and reference, whose log-probs the rewards or the estimator need."""

    timed = None  # it times its passes as `old_log_prob` and `ref`
    update: PolicyUpdate
    reference: Reference | None
    watch: Stopwatch

    def __call__(self, state: StepState) -> None:
        given = state.prompts, state.completions, state.rewards
        state.inputs = advantage_inputs(self.update, self.reference, *given, self.watch, state.temperature)
        state.metrics |= state.inputs.metrics


@dataclass
class TakeRewards:
    """Takes the rewards as they are for advantages."""

    timed = None

    def __call__(self, state: StepState) -> None:
        state.inputs = AdvantageInputs(state.rewards)


@dataclass
class Advantages:
    """Computes advantages; a group's statistics have all its valid responses."""

    timed = "adv"
    config: Config
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        inputs = state.inputs
        estimator, functions = self.config.algorithm.advantage, self.config.reward.functions
        given = state.completions, inputs.rewards, self.strategy, inputs.token_probs, inputs.kl_R
        state.advantages, state.token_advantages = raise_on_all_ranks(
            self.strategy, lambda: advantages_over_ranks(estimator, functions, *given)
        )
        state.trained = state.rewards.valid


@dataclass
class MaskTruncated:
    """Leaves responses that reached the length limit out of the update (`algorithm.mask_truncated`)."""

    timed = "adv"

    def __call__(self, state: StepState) -> None:
        state.trained = state.trained & state.completions.finished


@dataclass
class MakeBatch:
    """Makes the batch to train on."""

    timed = "adv"

    def __call__(self, state: StepState) -> None:
        given = state.prompts, state.completions, state.advantages, state.trained, state.token_advantages
        batch = assemble(*given, temperature=state.temperature)
        state.batch = state.inputs.add_old_logprobs(batch, state.trained, state.completions.lengths)
