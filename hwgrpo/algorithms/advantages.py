"""Advantages: one number per sequence, or per token, from the rewards of sequences, relative to their group.

Every estimator has the signature `(rewards_S, group_S, valid_S, config, lengths_S=None) -> advantages_S`; `grpo` is
here, the others are in `advantage_variants.py`; `hwgrpo/catalog.py` lists them by name. One with the decorator
`@token_level`, or that is given `kl_R`, returns one advantage per response token instead, `advantages_R`. Groups may be
ragged and in any order. Invalid sequences get advantage 0 and enter no statistic. A group whose valid rewards are all
equal gets exactly 0, decided by max == min: the standard deviation of equal numbers is often not 0 in floating point,
and dividing rounding noise by it would make a gradient out of nothing. Statistics are fp64.

Statistics over the batch (`std="batch"`, `gpg`, `reinforce_plus_plus_baseline`) cover the sequences passed in: pass
those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.algorithms.token_advantages import (
    TokenProbs,
    is_token_level,
    one_step_each,
    required_token_probs,
    takes,
)
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.own_copies import own_copy
from hwgrpo.step_rewards import StepRewards
from hwgrpo.torch_settings import with_kept_torch_settings
from hwgrpo.user_code import names_a_file


def group_advantages(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    parts: Mapping[str, tuple[float, torch.Tensor]] | None = None,
    steps: StepRewards | None = None,
    greedy_S: torch.Tensor | None = None,
    token_probs: TokenProbs | None = None,
    kl_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the advantage of each sequence, or of each token.

    Args:
        rewards_S: [S] fp64; ignored where not valid.
        group_S: [S] int64: prompt of each sequence.
        valid_S: [S] bool.
        config: the validated `algorithm.advantage` settings.
        lengths_S: [S] tokens per sequence, for estimators that weigh by tokens.
        parts: reward function -> its weight and its rewards [S] fp64, for estimators with an argument `parts`; None:
            `rewards_S` are those of one function.
        steps: the rewards of steps, for estimators with an argument `steps`; None: each response is one step.
        greedy_S: [S] fp64 rewards of the prompts' greedy responses, for estimators with an argument `greedy_S`; NaN,
            and None for all: there is none.
        token_probs: of the response tokens, for estimators with an argument `token_probs`, which need them.
        kl_R: [R] the KL of each token times its coefficient, whose sums `rewards_S` are less of, for estimators with an
            argument `kl_R`; None: there is no KL in the rewards.

    Returns:
        [S] fp32; for estimators with `is_token_level` [R] fp32, in the order of the sequences.

    Raises:
        ConfigError: an unknown estimator, lengths or probabilities are missing, or it returned another shape.
        DataError: half-precision or non-finite rewards, or a group of one under `singleton="error"`.
    """
    loaded = ADVANTAGES.load(config.name)
    arguments: dict[str, Any] = {}
    if takes(config, "parts"):
        arguments["parts"] = parts or {"reward": (1.0, rewards_S)}
    if takes(config, "steps"):
        arguments["steps"] = steps or one_step_each(rewards_S, lengths_S)
    if takes(config, "greedy_S"):
        arguments["greedy_S"] = torch.full_like(rewards_S, torch.nan) if greedy_S is None else greedy_S
    if takes(config, "token_probs"):
        arguments["token_probs"] = required_token_probs(config, token_probs)
    if takes(config, "kl_R"):
        arguments["kl_R"] = kl_R
    given: list[Any] = [rewards_S, group_S, valid_S, config, lengths_S]
    if names_a_file(config.name):  # it may compute in place, while the rewards are logged and the group is trained on
        given, arguments = own_copy(given), own_copy(arguments)
        loaded = with_kept_torch_settings(loaded, f"algorithm.advantage.name={config.name!r}")
    estimator = bind_arguments(loaded, config.kwargs | arguments, 5, "algorithm.advantage.kwargs")
    advantages = estimator(*given)
    per_token = is_token_level(config, kl_R is not None) and lengths_S is not None
    expected = int(lengths_S.sum()) if per_token and lengths_S is not None else len(rewards_S)
    if advantages.shape != (expected,):
        raise ConfigError(
            f"algorithm.advantage.name={config.name!r} returned advantages of shape {list(advantages.shape)} for "
            f"{len(rewards_S)} responses{f' of {expected} tokens' if per_token else ''}: return [{expected}]; one per "
            "token needs @token_level above the function (from hwgrpo.algorithms.token_advantages)"
        )
    if config.clip is None:
        return advantages
    return advantages.clamp(-config.clip, config.clip)


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
