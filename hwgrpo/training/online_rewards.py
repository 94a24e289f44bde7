"""Rewards whose models are trained during the run: their training after each step, their checkpoints and final models.

Each rank has all of such a model, and all are equal: rank 0 writes it into `reward-NAME.safetensors` of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.catalog import VERIFYING_REWARDS
from hwgrpo.config import Config
from hwgrpo.config.schema import AlgorithmConfig, RewardConfig
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.models.final_dtype import cast_weights
from hwgrpo.models.stored_dtype import cached_folder
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.models.trained_reward import TrainedReward
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.moving_reference import reference_files
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


def trains_models(rewards: RewardPipeline) -> bool:
    """Return whether a run trains the model of one of its rewards."""
    return bool(_models(rewards))


def train_reward_models(
    rewards: RewardPipeline, strategy: Strategy, device: torch.device, watch: Stopwatch, step: int
) -> None:
    """Train the reward models of a run that are due after a step; all ranks call this together.

    Args:
        rewards: the run's.
        strategy: gathers over ranks.
        device: the run's.
        watch: times it as part of the stage `reward`.
        step: the finished step.

    Raises:
        RunError: a loss or a gradient is not finite; on all ranks.
    """
    for model in _models(rewards).values():
        with watch("reward"):
            model.add(strategy.gather_objects(model.collect()))
            if model.is_due(step):
                raise_on_all_ranks(strategy, partial(model.train, step))
                if strategy.world_size > 1:
                    _copy_from_rank_0(model.network, device)
                model.measure_drift()


@torch.no_grad()
def _copy_from_rank_0(model: torch.nn.Module, device: torch.device) -> None:
    """Give all ranks rank 0's weights: some devices add up in no fixed order."""
    for parameter in model.parameters():
        sent = parameter.detach().to(device)  # where ranks exchange, wherever the model is
        dist.broadcast(sent, src=0)
        parameter.copy_(sent)


def further_files(
    algorithm: AlgorithmConfig, rewards: RewardPipeline, reference: Reference | None, strategy: Strategy
) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's checkpoint files with a moved reference and trained reward models, as copies."""
    files = reference_files(reference, strategy, algorithm.kl)
    if strategy.rank == 0:
        files |= {_file(name): model.state() for name, model in _models(rewards).items()}
    return files


def restore_rewards(rewards: RewardPipeline, checkpoint: Checkpoint, strategy: Strategy) -> list[str]:
    """Restore the running totals of rewards and trained reward models from a checkpoint.

    Returns:
        A note for each reward model that the checkpoint lacks.

    Raises:
        CheckpointError: a file cannot be read any more; on all ranks.
    """
    rewards.metrics.restore(checkpoint.manifest["state"].get("rewards", {}))

    def load() -> list[str]:
        notes = []
        for name, model in _models(rewards).items():
            path = checkpoint.folder / _file(name)
            if _file(name) in checkpoint.manifest["files"]:
                tensors = checkpoint_files.read_tensors(path)
                if not model.fits(tensors):
                    raise CheckpointError(
                        f"{path} is another model than that of the reward {name}: use the path of the run's start"
                    )
                model.restore(tensors)
            else:
                notes.append(f"{checkpoint.folder} has no reward model {name}: it starts untrained")
        return notes

    return raise_on_all_ranks(strategy, load)


def final_models(run: Any) -> dict[str, Callable[[Path], None]]:
    """Return name -> function that writes a trained reward model of a run in Hugging Face format to a folder.

    The weights get the dtype of `trainer.final_dtype`; auto is that of the weights that the model started from.
    """
    models = _models(run.rewards) if hasattr(run, "rewards") else {}  # supervised runs have none
    return {name: partial(_save, model, run.config.trainer.final_dtype) for name, model in models.items()}


def final_folders(reward: RewardConfig) -> list[str]:
    """Return the names of the folders of a run's trained reward models."""
    names = [entry.name for entry in reward.functions if entry.name in VERIFYING_REWARDS]
    return [f"final-{name}" if number == 1 else f"final-{name}_{number}" for number, name in enumerate(names, start=1)]


def check_online_rewards(config: Config) -> None:
    """Raise `ConfigError` if the baseline is a greedy response, which the rule seldom verifies."""
    if final_folders(config.reward) and takes(config.algorithm.advantage, "greedy_S"):
        raise ConfigError(
            f"algorithm.advantage.name={config.algorithm.advantage.name!r} with the reward online_reward_model: the "
            "baseline would be the model's score of a greedy response; use algorithm.advantage.name=rloo, which "
            "compares with the group"
        )


def _save(model: TrainedReward, dtype: str, folder: Path) -> None:
    model.save_pretrained(folder)
    cast_weights(folder, dtype, cached_folder(model.source, model.revision))


def _models(rewards: RewardPipeline) -> dict[str, TrainedReward]:
    found = {each.name: getattr(each, "call", None) for each in rewards.functions}
    return {name: model for name, model in found.items() if isinstance(model, TrainedReward)}


def _file(name: str) -> str:
    return f"reward-{name}.safetensors"
