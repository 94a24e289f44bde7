"""Stages that add old and reference log-probs to the batch, where they can differ from the current ones."""

from __future__ import annotations

from dataclasses import dataclass

from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import with_rollout_shares


@dataclass
class RolloutShares:
    """Adds the rollout's share in each token's old log-prob (`algorithm.old_logprobs=interpolated`)."""

    timed = "old_log_prob"

    def __call__(self, state: StepState) -> None:
        state.batch = with_rollout_shares(state.batch, state.completions, state.trained, state.step)


@dataclass
class OldLogprobs:
    """Adds the log-probs of the policy at the start of the update."""

    timed = "old_log_prob"
    update: PolicyUpdate

    def __call__(self, state: StepState) -> None:
        state.batch = self.update.with_old_logprobs(state.batch)


@dataclass
class RefLogprobs:
    """Adds the log-probs of the reference model."""

    timed = "ref"
    update: PolicyUpdate
    reference: Reference | None

    def __call__(self, state: StepState) -> None:
        state.batch = self.update.with_ref_logprobs(state.batch, self.reference)
