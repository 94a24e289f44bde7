"""Gates: reward functions without whose reward the others do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hwgrpo.errors import ConfigError

WHY_NOT = (
    "where a gate has no effect; use an estimator of one reward per response, e.g. algorithm.advantage.name=grpo, or "
    "leave gate out"
)


def gated_sum(values: Sequence[torch.Tensor], settings: Sequence[Any]) -> torch.Tensor:
    """Sum rewards by weight; where a gate's is not above 0, only those of the gates.

    Args:
        values: [S] fp64 per function, with those of its failure policy.
        settings: `RewardFunctionConfig` per function.

    Returns:
        [S] fp64.
    """
    total = torch.zeros_like(values[0])
    opened = torch.ones_like(total, dtype=torch.bool)
    for value, setting in zip(values, settings, strict=True):
        if setting.gate:
            opened &= value > 0
    for value, setting in zip(values, settings, strict=True):
        total += setting.weight * (value if setting.gate else torch.where(opened, value, 0.0))
    return total


def check_gates(settings: Sequence[Any], estimator: str, reads: str | None) -> None:
    """Check that the advantage estimator reads the sums, which alone are gated.

    Args:
        settings: `RewardFunctionConfig` per function.
        estimator: name of the advantage estimator.
        reads: what it reads besides the sums, for the message; None: nothing.

    Raises:
        ConfigError: it reads more, and there is a gate.
    """
    for number, setting in enumerate(settings):
        if setting.gate and reads is not None:
            raise ConfigError(
                f"reward.functions.{number}.gate=true with algorithm.advantage.name={estimator!r}, which reads {reads},"
                f" {WHY_NOT}"
            )
