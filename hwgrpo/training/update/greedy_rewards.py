"""Rewards of the greedy responses, the baseline of the others (ReMax)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from hwgrpo.errors import RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.values import Completions, PromptBatch, Rewards

ON_GREEDY = "on the greedy response to the prompt, the baseline of the others"
"""Begins the description of a failure of a reward function."""


def with_greedy_rewards(
    pipeline: RewardPipeline,
    prompts: PromptBatch,
    completions: Completions,
    greedy: Completions,
    rewards: Rewards,
    step: int,
) -> Rewards:
    """Score the greedy responses, one to each prompt, and add the column to the rewards of the others.

    Failures of the reward functions on them count as the others do.

    Raises:
        RewardError: a function failed on a greedy response under the policy `raise`.
    """
    try:
        scored = pipeline.score(prompts, greedy, step, drawing=("greedy", step))
    except RewardError as error:
        raise RewardError(f"{ON_GREEDY}: {error}") from error
    greedy_G = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
    greedy_G[greedy.prompt_index[scored.valid]] = scored.total[scored.valid]
    return replace(
        rewards,
        greedy=greedy_G[completions.prompt_index],
        failures=dict(Counter(rewards.failures) + Counter(scored.failures)),
        first_failures={kind: f"{ON_GREEDY}: {text}" for kind, text in scored.first_failures.items()}
        | dict(rewards.first_failures),
    )
