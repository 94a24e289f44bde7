"""Advantages of turns: one estimator compares turns of a group that were taken in the same state."""

from __future__ import annotations

from typing import Annotated

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.algorithms.token_advantages import step_lengths, step_places, token_level
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.values import StepRewards


@token_level
def gigpo(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    steps: StepRewards,
    gamma: Annotated[float, Limits(at_least=0, at_most=1)] = 0.95,
    episode_weight: Annotated[float, Limits(at_least=0)] = 1.0,
    step_weight: Annotated[float, Limits(at_least=0)] = 1.0,
) -> torch.Tensor:
    """Add a trajectory's advantage in its group to that of each turn among turns of the same state; [R] fp32.

    Of a token in turn t: `episode_weight * norm(r) + step_weight * norm(R_t)`, `R_t = r_t + gamma R_(t+1)`. `norm` is
    that of `grpo`: over the group's trajectories, and over the group's turns with the same state. A turn whose state no
    other turn of the group has, or is not known, has the first term alone, as have turns of equal returns. Source:
    GiGPO (Feng et al. 2025, arXiv 2505.10978).

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        steps: the rewards of the turns of all responses, and their states.
        gamma: discount of the rewards of later turns.
        episode_weight: weight of the trajectory's advantage.
        step_weight: weight of the turn's.
    """
    episodes = Groups(rewards_S, group_S, valid_S, config.singleton)
    sequence_K, _ = step_places(steps)
    of_episode_S = episodes.zero_without_signal(episodes.from_mean_S() / episodes.scale(config))
    advantage_K = episode_weight * of_episode_S[sequence_K]
    if steps.states is not None:
        known_K = valid_S[sequence_K] & (steps.states >= 0)
        group_and_state = torch.stack([group_S[sequence_K], steps.states])
        turns = Groups(
            discounted_returns(steps, gamma), torch.unique(group_and_state, dim=1, return_inverse=True)[1], known_K
        )
        advantage_K = advantage_K + step_weight * turns.zero_without_signal(turns.from_mean_S() / turns.scale(config))
    return torch.repeat_interleave(advantage_K, step_lengths(steps))


def discounted_returns(steps: StepRewards, gamma: float) -> torch.Tensor:
    """Return [K] fp64 `R_k = r_k + gamma R_(k+1)` within each response.

    Equal rewards to come give equal bits, wherever in a trajectory: from the last step backwards, without powers.
    """
    sequence_K, place_K = step_places(steps)
    to_go_K = steps.rewards.double().clone()
    following = torch.zeros(len(steps), dtype=torch.float64)
    for place in range(int(place_K.max()) if len(place_K) else -1, -1, -1):
        here = place_K == place
        to_go_K[here] += gamma * following[sequence_K[here]]
        following[sequence_K[here]] = to_go_K[here]
    return to_go_K
