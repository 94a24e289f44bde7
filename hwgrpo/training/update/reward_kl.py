"""The KL in the reward: each response's reward loses its KL to the reference, before advantages are computed."""

from __future__ import annotations

from dataclasses import replace

import torch

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Rewards, TrainBatch


def penalize(
    update: PolicyUpdate,
    reference: Reference,
    batch: TrainBatch,
    rewards: Rewards,
    old_R: torch.Tensor,
    watch: Stopwatch,
) -> tuple[Rewards, torch.Tensor, dict[str, float]]:
    """Subtract the KL of old policy and reference from a step's rewards, then adapt its coefficient.

    As verl's `apply_kl_penalty`, whose token-level rewards GRPO sums over the response.

    Args:
        update: has the policy and the coefficient.
        reference: the reference model.
        batch: this rank's valid responses.
        rewards: of all its responses.
        old_R: [R] fp32, the batch's old log-probs.
        watch: times the stage `ref`.

    Returns:
        The rewards, with `total` less the coefficient times the KL summed over the response's tokens; [R] fp64 that
        product of each token of the batch; and `actor/reward_kl_*` and `critic/rewards/*`, over all ranks.
    """
    strategy, coef, valid = update.strategy, update.coefficients.kl, rewards.valid
    with watch("ref"), reference.active():
        ref_R = update.score(batch, reference.policy)
    kl_R = build_kl(update.config.algorithm.kl)(old_R.double(), ref_R.double())
    if batch.loss_mask is not None:
        kl_R = kl_R.where(batch.loss_mask, 0.0)
    kl_S = sequence_sum(kl_R, batch.offsets)[0]
    total_S = rewards.total.clone()
    total_S[valid] -= coef * kl_S
    means, responses = strategy.sum([float((kl_S / batch.loss_lengths.clamp(min=1)).sum()), len(batch)])
    kl = means / max(responses, 1)
    update.coefficients.follow_kl(kl, responses)
    metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef}
    totals = torch.cat(strategy.gather_objects(total_S[valid]))
    if len(totals):
        ends = (("mean", totals.mean()), ("max", totals.max()), ("min", totals.min()))
        metrics |= {f"critic/rewards/{name}": float(value) for name, value in ends}
    return replace(rewards, total=total_S), coef * kl_R, metrics
