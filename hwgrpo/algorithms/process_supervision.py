"""Process supervision: advantages of tokens from the rewards of the steps of a response."""

from __future__ import annotations

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.algorithms.token_advantages import token_level
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.step_rewards import StepRewards


@token_level
def process(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    steps: StepRewards,
) -> torch.Tensor:
    """Sum the normalised rewards of the steps that end at a token or after it; [R] fp32.

    A step's reward is normalised as a response's by `grpo`, over all steps of its group. A group whose steps all have
    the same reward gets exactly 0. Source: DeepSeekMath (Shao et al. 2024, section 4.1.3).

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        steps: the rewards of the steps of all responses.
    """
    counts_S = steps.offsets.diff()
    sequence_K = torch.repeat_interleave(counts_S)
    groups = Groups(steps.rewards, group_S[sequence_K], valid_S[sequence_K], config.singleton)
    normalised_K = groups.zero_without_signal(groups.from_mean_S() / groups.scale(config))
    place_K = torch.arange(len(sequence_K)) - steps.offsets[:-1][sequence_K]
    padded_SM = torch.zeros(len(counts_S), int(counts_S.max()) if len(counts_S) else 0, dtype=torch.float64)
    padded_SM[sequence_K, place_K] = normalised_K.double()
    to_go_K = padded_SM.flip(1).cumsum(1).flip(1)[sequence_K, place_K]
    before_K = torch.where(place_K == 0, -1, steps.ends.roll(1))
    return torch.repeat_interleave(to_go_K, steps.ends - before_K).float()
