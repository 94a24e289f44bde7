"""The greedy response to each prompt of a step, whose reward is the baseline of ReMax."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.errors import RewardError
from hwgrpo.training.feed.response_source import Batch
from hwgrpo.training.run_parts import Run
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.values import Completions, PromptBatch, Rewards

ON_GREEDY = "on the greedy response to the prompt, the baseline of the others"
"""Begins the description of a failure of a reward function."""


def sample_greedy(run: Run, prompts: PromptBatch) -> Completions | None:
    """Return one greedy response to each prompt by the engine's weights; None if the estimator reads none."""
    if not takes(run.config.algorithm.advantage, "greedy_S"):
        return None
    sampling = replace(run.sampling, n=1, greedy=True)
    with run.responses.exclusive_engine():  # a source of the user's may prefetch
        return raise_on_all_ranks(run.strategy, lambda: run.engine.generate(prompts, sampling))


def with_greedy_rewards(run: Run, rewards: Rewards, batch: Batch, greedy: Completions | None, step: int) -> Rewards:
    """Return a step's rewards with those of the greedy responses to the same prompts.

    Args:
        run: scores them.
        rewards: of the batch's responses.
        batch: the step's prompts and responses.
        greedy: from `sample_greedy`.
        step: the step.

    Returns:
        The rewards; failures of the reward functions on greedy responses count as the others do.
    """
    if greedy is None:
        return rewards

    def score() -> Rewards:
        try:
            return run.rewards.score(batch.prompts, greedy, step, drawing=("greedy", step))
        except RewardError as error:
            raise RewardError(f"{ON_GREEDY}: {error}") from error

    scored = raise_on_all_ranks(run.strategy, score)
    greedy_G = torch.full((len(batch.prompts),), torch.nan, dtype=torch.float64)
    greedy_G[greedy.prompt_index[scored.valid]] = scored.total[scored.valid]
    return replace(
        rewards,
        greedy=greedy_G[batch.completions.prompt_index],
        failures=dict(Counter(rewards.failures) + Counter(scored.failures)),
        first_failures={kind: f"{ON_GREEDY}: {text}" for kind, text in scored.first_failures.items()}
        | dict(rewards.first_failures),
    )
