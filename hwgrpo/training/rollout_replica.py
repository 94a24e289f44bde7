"""The unsharded copy of the policy that the local engine samples with, where the policy itself cannot."""

from __future__ import annotations

from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.local.frozen_copy import copy_frozen
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights


def make_replica(config: Config, policy: PolicyModel, weights: Rank0Weights | None) -> Any:
    """Return an unsharded copy of a policy's model on this rank's device, for the local engine to sample with.

    Args:
        config: the run's settings.
        policy: not wrapped by a strategy.
        weights: the copy's weights, if the policy is on the meta device.
    """
    pairs = None if weights is None else weights.broadcast_all(policy.model)
    return copy_frozen(policy.model, sampler_dtype(config, policy), pairs)


def needs_replica(config: Config, shards: bool) -> bool:
    """Return whether the engine samples with a separate copy of the policy in this process.

    Args:
        config: the run's settings.
        shards: whether the strategy shards the policy's weights.
    """
    return engine_kind(config).samples_with_policy and (shards or config.rollout.max_staleness > 0)


def sampler_dtype(config: Config, policy: PolicyModel) -> torch.dtype:
    """Return the dtype that responses are sampled in."""
    wanted = config.rollout.dtype
    return policy.compute_dtype if wanted == "auto" else getattr(torch, wanted)
