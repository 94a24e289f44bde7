"""Arguments and a reward of runs for TRL's trainer that take a second."""

from typing import Any

SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": 1,
}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Prefer long responses."""
    return [float(len(each)) for each in completions]
