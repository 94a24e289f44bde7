"""The KL in the reward: each response's reward loses its KL to the reference, before advantages are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch


@dataclass(frozen=True)
class Penalized:
    """A step's rewards less the KL, and what was computed for it."""

    rewards: Rewards
    """The step's, with `total` less the coefficient times the KL summed over the response's tokens."""
    old_logprobs: torch.Tensor
    """[R] fp32, of the valid responses' tokens."""
    metrics: dict[str, float]
    """`actor/reward_kl_*` and `critic/rewards/*`, over all ranks."""

    def add_old_logprobs(self, batch: TrainBatch, trained: torch.Tensor, lengths: torch.Tensor) -> TrainBatch:
        """Return the batch with the old log-probs computed here.

        Args:
            batch: the responses that are trained.
            trained: [S] bool: those of all responses that are in `batch`; each is valid.
            lengths: [S] tokens of all responses.
        """
        valid = self.rewards.valid
        kept_R = torch.repeat_interleave(trained[valid], lengths[valid])
        return replace(batch, old_logprobs=self.old_logprobs[kept_R])


def penalize(
    update: PolicyUpdate,
    reference: Reference,
    prompts: PromptBatch,
    completions: Completions,
    rewards: Rewards,
    watch: Stopwatch,
) -> Penalized:
    """Take the KL of old policy and reference from a step's rewards, then adapt its coefficient.

    As verl's `apply_kl_penalty`, whose token-level rewards GRPO sums over the response.

    Args:
        update: has the policy and the coefficient.
        reference: the reference model.
        prompts: this rank's prompts.
        completions: their responses.
        rewards: their rewards.
        watch: times the stages `old_log_prob` and `ref`.
    """
    strategy, coef, valid = update.strategy, update.coefficients.kl, rewards.valid
    batch = assemble(prompts, completions, torch.zeros(len(valid)), valid)
    from_rollout = update.config.algorithm.old_logprobs == "rollout"
    with watch("old_log_prob"):
        old_R = batch.rollout_logprobs if from_rollout else update.score(batch)
    with watch("ref"), reference.active():
        ref_R = update.score(batch, reference.policy)
    kl_R = build_kl(update.config.algorithm.kl)(old_R.double(), ref_R.double())
    kl_S = sequence_sum(kl_R, batch.offsets)[0]
    total_S = rewards.total.clone()
    total_S[valid] -= coef * kl_S
    means, responses = strategy.sum([float((kl_S / batch.lengths.clamp(min=1)).sum()), len(batch)])
    kl = means / max(responses, 1)
    update.coefficients.follow_kl(kl, responses)
    metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}
    totals = torch.cat(strategy.gather_objects(total_S[valid]))
    if len(totals):
        ends = (("mean", totals.mean()), ("max", totals.max()), ("min", totals.min()))
        metrics |= {f"critic/rewards/{name}": float(value) for name, value in ends}
    return Penalized(replace(rewards, total=total_S), old_R, metrics)
