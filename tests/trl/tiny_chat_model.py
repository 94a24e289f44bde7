"""A tiny model folder for TRL scripts, made on the spot."""

from __future__ import annotations

from pathlib import Path

from tests.support.models.reward_models import save_reward_model


def save_chat_model(folder: Path) -> None:
    """Write a random causal language model of single characters, with a chat template."""
    save_reward_model(folder, "language model", chat=True, positions=1024)
