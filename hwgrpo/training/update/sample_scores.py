"""A few short sequences of a step, and what a machine computes of them: values, and how far rounding moves each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from hwgrpo.models.rounding import DRAWS, embeddings_rounded_once
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import TrainBatch

LOG_PROBS, ENTROPY = "log-probs", "entropy"


@dataclass(frozen=True)
class SampleScores:
    """What a machine computes of the R response tokens of a sample."""

    values: Mapping[str, torch.Tensor]
    """Stage -> [R] fp32, on the host."""
    rounding: Mapping[str, float]
    """Stage -> largest change of any value by one rounding of the embeddings, in a few draws."""


def score_sample(update: PolicyUpdate, sample: TrainBatch) -> SampleScores:
    """Score a sample without gradient, dropout or random numbers; all ranks call it together, with the same sample.

    Args:
        update: scores by the policy.
        sample: the sequences, which have a temperature of their own.
    """
    policy = update.policy
    values = _score(update, sample)
    rounding = dict.fromkeys(values, 0.0)
    for seed in range(DRAWS):
        with embeddings_rounded_once(policy.base.get_input_embeddings(), policy.compute_dtype, seed):
            draw = _score(update, sample)
        changes = {stage: float((draw[stage] - values[stage]).abs().max()) for stage in values}
        rounding = {stage: max(rounding[stage], change) for stage, change in changes.items()}
    if policy.head_operand is not None:
        policy.head_operand.release()  # the rollout that follows has other uses for its memory
    if isinstance(policy, FSDPModule):
        policy.reshard()  # the head stays gathered after a forward, for a backward that does not follow
    return SampleScores(values, rounding)


def _score(update: PolicyUpdate, sample: TrainBatch) -> dict[str, torch.Tensor]:
    entropies = torch.zeros(len(sample.tokens))
    logprobs = update.score(sample, entropies=entropies)
    return {LOG_PROBS: logprobs, ENTROPY: entropies}
