"""Old log-probs between those of the rollout engine and the current ones (`algorithm.old_logprobs=interpolated`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hwgrpo.config import Config
from hwgrpo.values import Completions, TrainBatch


def with_rollout_shares(
    batch: TrainBatch, config: Config, completions: Completions, trained: torch.Tensor, step: int
) -> TrainBatch:
    """Return the batch with the rollout's share in each token's old log-prob, if the settings interpolate it.

    The old policy is the one before the update, one version behind the policy in training: between the versions of the
    sampler and of that policy it has the place 1 - 1 / (their difference). Source: AReaL's `loglinear`.

    Args:
        batch: the step's sequences.
        config: the run's settings.
        completions: S responses.
        trained: [S] bool: those in `batch`.
        step: the step, whose update makes weights of this version.
    """
    if config.algorithm.old_logprobs != "interpolated":
        return batch
    versions_R = completions.versions
    if versions_R is None:
        versions_R = torch.full_like(completions.tokens, completions.weight_version)
    versions_R = versions_R[completions.per_token_of(trained)]
    return replace(batch, rollout_shares=1 / (step - versions_R).clamp(min=1).float())
