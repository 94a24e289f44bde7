"""The reward functions of a run, checked against its data and its advantage estimator; their metrics over ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hwgrpo_backends.device import Device

from hwgrpo.algorithms.token_advantages import steps_are_turns, takes
from hwgrpo.config import Config
from hwgrpo.config.schema import RewardConfig
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.data.reward_check import COMPARING
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.rewards.combine import RewardPipeline, check_gates
from hwgrpo.rewards.trajectory_outcomes import TurnFinder
from hwgrpo.training.online_rewards import check_online_rewards
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


def build_rewards(
    config: Config,
    dataset: PromptDataset,
    validation: PromptDataset | None = None,
    rank: int = 0,
    tokenizer: Any = None,
    device: Device | None = None,
) -> RewardPipeline:
    """Load the reward functions and check that the data has the columns they read.

    Args:
        config: the run's settings.
        dataset: the prompts whose responses are scored.
        validation: the validation prompts.
        rank: this process's rank, for functions that draw random numbers.
        tokenizer: finds the tokens of steps, where the advantage estimator reads their rewards.
        device: this process's device, for rewards with models of their own; None: the CPU.

    Raises:
        ConfigError: a function cannot be loaded, or reads a column that the data lacks.
        DataError: a prompt has no ground truth, and a reward that compares with it would stop the run; or a reward
            says that it can score no response to a prompt.
    """
    for data in filter(None, (dataset, validation)):
        require_ground_truths(config.reward, data)
    inputs = {"steps": "rewards of steps", "parts": "each reward function by itself"}
    reads = next((what for name, what in inputs.items() if takes(config.algorithm.advantage, name)), None)
    check_gates(config.reward.functions, config.algorithm.advantage.name, reads)
    check_online_rewards(config)
    rewards = open_rewards(config, dataset.columns, rank, tokenizer, device)
    try:
        for data in filter(None, (dataset, validation)):
            rewards.check_prompts(data.prompt(row, 0) for row in range(len(data)))
    except BaseException:
        rewards.close()
        raise
    return rewards


def open_rewards(
    config: Config,
    columns: Collection[str] | None,
    rank: int = 0,
    tokenizer: Any = None,
    device: Device | None = None,
) -> RewardPipeline:
    """Load the reward functions, without a check of the data.

    Args:
        config, rank, tokenizer, device: as for `build_rewards`.
        columns: the columns of the data; None: those of the first batch.

    Raises:
        ConfigError: a function cannot be loaded, or reads a column that the data lacks.
    """
    context = {
        "max_response_tokens": config.rollout.max_response_tokens,
        "sandbox_level": config.reward.sandbox.level,
        "policy_path": resolve_model_path(config.model.path),
        "training_seed": config.trainer.seed,
        "samples_per_prompt": config.rollout.n,
        "template_date": config.data.template_date,
    }
    steps = None
    if takes(config.algorithm.advantage, "steps"):
        from hwgrpo.rewards.response_steps import StepFinder

        if steps_are_turns(config.algorithm):
            steps = TurnFinder(needs_lists=config.algorithm.advantage.name == "process")
        else:
            steps = StepFinder(config.algorithm.process, tokenizer, config.rollout.skip_special_tokens)
    place, seed = None if device is None else device.torch_device, (config.trainer.seed, rank)
    return RewardPipeline(
        config.reward,
        context=context,
        columns=columns,
        seed=seed,
        steps=steps,
        device=place,
        on_failure=config.rollout.agent.on_failure,
    )


def require_ground_truths(reward: RewardConfig, data: PromptDataset) -> None:
    """Raise `DataError` if a prompt has no ground truth, and a reward that compares with it would stop the run."""
    for function in reward.functions:
        if function.name in COMPARING and function.on_error == "raise":
            data.require_ground_truth(f"reward {function.name}")


def reward_metrics(rewards: RewardPipeline, strategy: Strategy) -> dict[str, float]:
    """Return the metrics of rewards with state since the last call, over ranks; all ranks call this together.

    Raises:
        RunError: as `RewardMetrics.read` does; on all ranks.
    """
    if not rewards.metrics:
        return {}
    return rewards.metrics.over_ranks(strategy.gather_objects(raise_on_all_ranks(strategy, rewards.metrics.read)))
