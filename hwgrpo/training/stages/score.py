"""Stages that score responses."""

from __future__ import annotations

from dataclasses import dataclass

from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.training.feed.difficulty_report import report_batch
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.advantage_inputs import shuffle_rewards
from hwgrpo.training.update.greedy_rewards import with_greedy_rewards


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
    """Scores the greedy responses, unless their source has."""

    timed = "reward"
    rewards: RewardPipeline
    strategy: Strategy

    def __call__(self, state: StepState) -> None:
        if state.rewards.greedy is None:
            scored = (self.rewards, state.prompts, state.completions, state.greedy, state.rewards, state.step)
            state.rewards = raise_on_all_ranks(self.strategy, lambda: with_greedy_rewards(*scored))
