"""Advantages: one number per sequence from one reward per sequence, relative to its group.

Every estimator has the signature `(rewards_S, group_S, valid_S, config, lengths_S=None) -> advantages_S`; `grpo` is
here, the others are in `advantage_variants.py`; `hwgrpo/catalog.py` lists them by name. Groups may be ragged and in any
order. Invalid sequences get advantage 0 and enter no statistic. A group whose valid rewards are all equal gets exactly
0, decided by max == min: the standard deviation of equal numbers is often not 0 in floating point, and dividing
rounding noise by it would make a gradient out of nothing. Statistics are fp64.

Statistics over the batch (`std="batch"`, `gpg`, `reinforce_plus_plus_baseline`) cover the sequences passed in: pass
those of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.user_code import bind_arguments


def group_advantages(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    parts: Mapping[str, tuple[float, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Compute the advantage of each sequence.

    Args:
        rewards_S: [S] fp64; ignored where not valid.
        group_S: [S] int64: prompt of each sequence.
        valid_S: [S] bool.
        config: the validated `algorithm.advantage` settings.
        lengths_S: [S] tokens per sequence, for estimators that weigh by tokens.
        parts: reward function -> its weight and its rewards [S] fp64, for estimators with an argument `parts`; None:
            `rewards_S` are those of one function.

    Returns:
        [S] fp32.

    Raises:
        ConfigError: an unknown estimator, or lengths are missing where it needs them.
        DataError: half-precision or non-finite rewards, or a group of one under `singleton="error"`.
    """
    loaded = ADVANTAGES.load(config.name)
    takes_parts = "parts" in inspect.signature(loaded).parameters
    arguments = {"parts": parts or {"reward": (1.0, rewards_S)}} if takes_parts else {}
    estimator = bind_arguments(loaded, config.kwargs | arguments, 5, "algorithm.advantage.kwargs")
    advantages_S = estimator(rewards_S, group_S, valid_S, config, lengths_S)
    if config.clip is None:
        return advantages_S
    return advantages_S.clamp(-config.clip, config.clip)


def grpo(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """(r - mean) / (std + eps), or r - mean for `std="none"`.

    Sources: DeepSeekMath (Shao et al. 2024, section 4.1.2); without std: Dr.GRPO (Liu et al. 2025).
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    return groups.zero_without_signal(groups.from_mean_S() / groups.scale(config))
