"""Rewards whose models are trained during the run: their training after each step, their checkpoints and final models.

Each rank has all of such a model, and all are equal: rank 0 writes it into `reward-NAME.safetensors` of a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from hwgrpo.errors import RunError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.models.online_reward_model import OnlineRewardModel
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


def train_reward_models(rewards: RewardPipeline, strategy: Strategy, step: int) -> None:
    """Train the reward models of a run that are due after a step; all ranks call this together.

    Raises:
        RunError: a loss is not finite.
    """
    for model in _models(rewards).values():
        model.learn(step, strategy.gather_objects)


def reward_files(rewards: RewardPipeline, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's checkpoint files with trained reward models, as copies."""
    return {_file(name): model.state() for name, model in _models(rewards).items()} if rank == 0 else {}


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
            if _file(name) in checkpoint.manifest["files"]:
                model.restore(checkpoint_files.read_tensors(checkpoint.folder / _file(name)))
            else:
                notes.append(f"{checkpoint.folder} has no reward model {name}: it starts untrained")
        return notes

    return raise_on_all_ranks(strategy, load)


def save_reward_models(rewards: RewardPipeline, output: Path) -> dict[str, Path]:
    """Write the trained reward models in Hugging Face format; return name -> folder.

    Raises:
        RunError: a folder cannot be written.
    """
    folders = {}
    for name, model in _models(rewards).items():
        folder = output / f"final-{name}"
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            checkpoint_files.discard(partial)
            partial.mkdir()
            model.save_pretrained(partial)
            if folder.is_dir():
                shutil.rmtree(folder)
            os.replace(partial, folder)
        except OSError as error:
            raise RunError(
                f"the reward model could not be written to {folder}: {error}; make room or restore access there, then "
                "start again: the run's steps are finished and saved"
            ) from error
        folders[name] = folder
    return folders


def _models(rewards: RewardPipeline) -> dict[str, OnlineRewardModel]:
    found = {each.name: getattr(each, "call", None) for each in rewards.functions}
    return {name: model for name, model in found.items() if isinstance(model, OnlineRewardModel)}


def _file(name: str) -> str:
    return f"reward-{name}.safetensors"
