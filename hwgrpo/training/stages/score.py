"""Stages that score responses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from hwgrpo.errors import RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.training.feed.difficulty_report import report_batch
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.reward_shuffle import shuffle_rewards
from hwgrpo.values import Rewards

ON_GREEDY = "on the greedy response to the prompt, the baseline of the others"
"""Begins the description of a failure of a reward function."""


@dataclass
class Score:
    """Scores the responses, unless their source has."""

    timed = "reward"
    rewards: RewardPipeline
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        scored = state.generated.rewards
        if scored is None:
            scored = raise_on_all_ranks(
                self.strategy, lambda: self.rewards.score(state.prompts, state.completions, state.step)
            )
        state.rewards = scored


@dataclass
class ShuffleRewards:
    """Permutes the rewards (`reward.shuffle`); a source that scores has done it group by group."""

    timed = "reward"
    seed: int
    rank: int

    def __call__(self, state: StepState) -> None:
        if state.generated.rewards is None:
            state.rewards = shuffle_rewards(state.rewards, self.seed, state.step, self.rank)


@dataclass
class ReportDifficulty:
    """Reports mean rewards to a sampler that sets prompts aside; a source that scores has done it."""

    timed = "reward"
    prompts: PromptSource
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        if state.generated.rewards is None:
            report_batch(self.prompts, self.strategy, state.prompts, state.completions, state.rewards)


@dataclass
class GreedyRewards:
    """Scores the greedy responses; failures of the reward functions on them count as the others do."""

    timed = "reward"
    rewards: RewardPipeline
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        greedy, rewards = state.greedy, state.rewards

        def score() -> Rewards:
            try:
                return self.rewards.score(state.prompts, greedy, state.step, drawing=("greedy", state.step))
            except RewardError as error:
                raise RewardError(f"{ON_GREEDY}: {error}") from error

        scored = raise_on_all_ranks(self.strategy, score)
        greedy_G = torch.full((len(state.prompts),), torch.nan, dtype=torch.float64)
        greedy_G[greedy.prompt_index[scored.valid]] = scored.total[scored.valid]
        state.rewards = replace(
            rewards,
            greedy=greedy_G[state.completions.prompt_index],
            failures=dict(Counter(rewards.failures) + Counter(scored.failures)),
            first_failures={kind: f"{ON_GREEDY}: {text}" for kind, text in scored.first_failures.items()}
            | dict(rewards.first_failures),
        )
