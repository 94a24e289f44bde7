"""Selecting tokens of an update by comparing all of them: for losses and masks that need statistics over the update.

A selection sees the tokens of all ranks in the order of the prompts, so it depends on neither ranks nor micro-batches.
verl and TRL compare the tokens of a micro-batch or of a device with each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo.algorithms.scope import Scoped
from hwgrpo.config.bound_arguments import own_arguments
from hwgrpo.config.schema import AlgorithmConfig, LossConfig


@dataclass(frozen=True)
class UpdateTokens:
    """The R response tokens of an update, over all ranks, without gradient."""

    logprob_R: torch.Tensor
    """Of the policy before the update."""
    old_logprob_R: torch.Tensor
    rollout_logprob_R: torch.Tensor
    entropy_R: torch.Tensor
    """Of the policy before the update, nats."""
    advantage_R: torch.Tensor
    order_R: torch.Tensor
    """A random permutation of 0 to R - 1, for selections by chance."""
    lengths_S: torch.Tensor
    """[S] int64: response tokens of each sequence."""


ROUNDING = 1e-5
"""Nats by which entropies may differ that are the same but for rounding."""
MASKS = {"trusted": "trusted_tokens", "uncertain": "uncertain_tokens"}
"""Selections outside of which the policy loss is 0, and their metrics."""


def selections_of(
    algorithm: AlgorithmConfig, loss: Scoped[..., Any]
) -> dict[str, Callable[[UpdateTokens], torch.Tensor]]:
    """Return the selections that the settings need, by the name of the row that carries them: 1 where selected."""
    found: dict[str, Callable[[UpdateTokens], torch.Tensor]] = {}
    if loss.selects is not None:
        wanted = inspect.signature(loss.selects).parameters
        arguments = {name: value for name, value in own_arguments(loss.function).items() if name in wanted}
        found["selected"] = functools.partial(loss.selects, config=algorithm.loss, **arguments)
    if algorithm.m2po_threshold is not None:
        found["trusted"] = functools.partial(trusted_second_moment, threshold=algorithm.m2po_threshold)
    if algorithm.top_entropy_share < 1:
        found["uncertain"] = functools.partial(highest_entropies, share=algorithm.top_entropy_share)
        if algorithm.entropy_coef or algorithm.entropy_target is not None:
            found["bonus"] = functools.partial(entropy_weights, share=algorithm.top_entropy_share)
    return found


def covariances(tokens: UpdateTokens) -> torch.Tensor:
    """Return [R] (A - mean A) (logprob - mean logprob): what a token adds to the covariance that lowers the entropy."""
    advantage_R, logprob_R = tokens.advantage_R.double(), tokens.logprob_R.double()
    return (advantage_R - advantage_R.mean()) * (logprob_R - logprob_R.mean())


def largest_covariances(tokens: UpdateTokens, config: LossConfig, *, share: float) -> torch.Tensor:
    """Select the share of tokens with the largest covariance, at least one. Source: KL-Cov (Cui et al. 2025)."""
    covariance_R = covariances(tokens)
    selected_R = torch.zeros(len(covariance_R), dtype=torch.bool)
    count = max(1, int(len(covariance_R) * share)) if len(covariance_R) else 0
    selected_R[covariance_R.sort(descending=True, stable=True).indices[:count]] = True
    return selected_R


def some_covariances(
    tokens: UpdateTokens, config: LossConfig, *, share: float, low: float, high: float
) -> torch.Tensor:
    """Select, by chance, that share of all tokens from those with a covariance between the bounds, at least one.

    Tokens that PPO's clip leaves without gradient are not selected. Source: Clip-Cov (Cui et al. 2025).
    """
    covariance_R = covariances(tokens)
    ratio_R = (tokens.logprob_R - tokens.old_logprob_R).exp()
    bounded_R = ratio_R.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped_R = -tokens.advantage_R * bounded_R > -tokens.advantage_R * ratio_R
    candidates = ((covariance_R > low) & (covariance_R < high) & ~clipped_R).nonzero()[:, 0]
    count = max(1, int(len(covariance_R) * share))
    selected_R = torch.zeros(len(covariance_R), dtype=torch.bool)
    selected_R[candidates[tokens.order_R[candidates].argsort()[:count]]] = True
    return selected_R


def trusted_second_moment(tokens: UpdateTokens, *, threshold: float) -> torch.Tensor:
    """Select tokens so that the mean of (old_logprob - rollout_logprob)^2 over them is below the threshold.

    The largest are left out, one by one; one token stays in any case. Source: M2PO (Zheng et al. 2025), as in AReaL.
    """
    squares_R = (tokens.old_logprob_R.double() - tokens.rollout_logprob_R.double()).square()
    ascending = squares_R.sort(stable=True)
    means = ascending.values.cumsum(0) / torch.arange(1, len(squares_R) + 1)
    count = max(1, int((means < threshold).sum())) if len(squares_R) else 0  # means never fall
    selected_R = torch.zeros(len(squares_R), dtype=torch.bool)
    selected_R[ascending.indices[:count]] = True
    return selected_R


def highest_entropies(tokens: UpdateTokens, *, share: float) -> torch.Tensor:
    """Select the tokens whose entropy is at least its (1 - share) quantile, interpolated linearly.

    The first tokens of a group have one entropy, which rounds differently in other micro-batches: it is one here, too.
    Source: Wang et al. 2025 (Beyond the 80/20 Rule), as TRL's top_entropy_quantile.
    """
    if not len(tokens.entropy_R):
        return torch.zeros(0, dtype=torch.bool)
    ascending = tokens.entropy_R.double().sort().values
    place = (1 - share) * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    quantile = ascending[below] + (place - below) * (ascending[above] - ascending[below])
    return tokens.entropy_R.double() >= quantile - ROUNDING


def entropy_weights(tokens: UpdateTokens, *, share: float) -> torch.Tensor:
    """Return [R] fp32 weights of the entropy bonus: 0 outside of the highest entropies, with a mean of 1, as in TRL."""
    selected_R = highest_entropies(tokens, share=share).float()
    return selected_R / selected_R.mean() if len(selected_R) else selected_R
