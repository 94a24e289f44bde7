"""The optimal token baseline: a baseline for each position of a group, by the variance of its responses' gradients."""

from __future__ import annotations

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.algorithms.token_advantages import TokenProbs, token_level
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError

_EPS = 1e-8


@token_level
def optimal_token_baseline(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    token_probs: TokenProbs,
) -> torch.Tensor:
    """Subtract the mean reward at a token's position, weighted by the squared gradient norm until there; [R] fp32.

    A token adds `1 - 2 p + sum_v p_v^2`, the squared norm of the gradient of its log-prob with respect to the logits.
    The mean is over the responses of the group that have a token at the position; where that is one, it is 0. Source:
    optimal token baseline, as verl's `compute_optimal_token_baseline_advantage` without rollout weights, where a group
    of equal rewards does not get exactly 0.

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        token_probs: of the response tokens, under the old policy.
    """
    if lengths_S is None:
        raise ConfigError("advantage estimator 'optimal_token_baseline' has one advantage per token: pass lengths_S")
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    most = int(lengths_S.max()) if len(lengths_S) else 0
    sequence_R = torch.repeat_interleave(lengths_S)
    place_R = torch.arange(len(sequence_R)) - (lengths_S.cumsum(0) - lengths_S)[sequence_R]
    is_token_ST = torch.arange(most) < torch.where(valid_S, lengths_S, 0)[:, None]
    norm_R = 1 - 2 * token_probs.logprobs.double().exp() + token_probs.square_sums.double()
    norm_ST = torch.zeros(len(lengths_S), most, dtype=torch.float64)
    norm_ST[sequence_R, place_R] = norm_R.clamp(min=0)  # rounding can make it negative
    weight_ST = norm_ST.cumsum(1) * is_token_ST
    baseline_GT = groups.sum_G(weight_ST * groups.reward_S[:, None]) / (groups.sum_G(weight_ST) + _EPS)
    baseline_GT[groups.sum_G(is_token_ST.double()) == 1] = 0
    advantage_R = groups.reward_S[sequence_R] - baseline_GT[groups.index_S[sequence_R], place_R]
    return torch.where(groups.has_signal_S[sequence_R], advantage_R, 0.0).float()
