"""Advantage estimators over groups: from one reward per sequence to one advantage per sequence.

Every estimator has the signature `(rewards_S, group_S, valid_S, config, lengths_S=None) -> advantages_S`. Groups may
be ragged and in any order. Invalid sequences get advantage 0 and take no part in any statistic. A group whose valid
rewards are all equal gets exactly 0, decided by max == min: a standard deviation of equal numbers is often not 0 in
floating point, and dividing that noise by it makes a gradient out of nothing. Statistics are fp64.

Statistics over the batch (`std="batch"`, `gpg`, `reinforce_plus_plus_baseline`) cover the sequences given: hand in
those of all ranks.
"""

from __future__ import annotations

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.user_code import with_arguments


def group_advantages(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the advantage of each sequence.

    Args:
        rewards_S: [S] fp64; meaningless where not valid.
        group_S: [S] int64: which prompt each sequence answers.
        valid_S: [S] bool.
        config: the section `algorithm.advantage` of checked settings.
        lengths_S: [S] tokens per sequence, for `opo` and `reinforce_plus_plus_baseline`.

    Returns:
        [S] fp32.

    Raises:
        ConfigError: an unknown estimator, or lengths are missing where it needs them.
        DataError: half-precision or non-finite rewards, or a group of one under `singleton="error"`.
    """
    estimator = with_arguments(ADVANTAGES.load(config.name), config.kwargs, 5, "algorithm.advantage.kwargs")
    return estimator(rewards_S, group_S, valid_S, config, lengths_S)


def zero_signal_groups(rewards_S: torch.Tensor, group_S: torch.Tensor, valid_S: torch.Tensor) -> tuple[int, int]:
    """Count the groups that teach nothing because their valid rewards are all equal (a single one included).

    Args:
        rewards_S, group_S, valid_S: as for `group_advantages`.

    Returns:
        (such groups, groups with at least one valid sequence): the ratio of their sums over ranks is TRL's
        `frac_reward_zero_std`.
    """
    groups = Groups(rewards_S, group_S, valid_S)
    filled_G = groups.size_G > 0
    return int((filled_G & ~groups.signal_G).sum()), int(filled_G.sum())


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
    return groups.silence(groups.from_mean_S() / _scale(groups, config))


def rloo(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reward minus the mean of the others: (r - mean) n/(n - 1). Source: Ahmadian et al. 2024."""
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    size_S = groups.size_G[groups.index_S]
    factor_S = torch.where(size_S > 1, size_S / (size_S - 1), 1.0)
    return groups.silence(groups.from_mean_S() * factor_S)


def opo(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reward minus the length-weighted mean of the group. Source: OPO (Hao et al. 2025)."""
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    length_S = _valid_lengths("opo", groups, lengths_S)
    # A group of empty responses has no weights: its baseline is then 0, and its rewards reach no token anyway.
    baseline_G = groups.sum_G(length_S * groups.reward_S) / groups.sum_G(length_S).clamp(min=1)
    return groups.silence(groups.deviation_S(baseline_G))


def gpg(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha (r - mean), alpha = sequences / sequences with a reward other than 0, over the batch.

    Source: GPG (Chu et al. 2025), with verl's f_norm = 1.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    alpha = valid_S.sum() / groups.reward_S.count_nonzero().clamp(min=1)
    return groups.silence(alpha * groups.from_mean_S())


def grpo_passk(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Only the best of a group learns: by its lead over the second best, scaled as in `grpo`.

    A tie for the best has no lead: all zero. Source: arXiv 2503.19595, as in verl.

    Raises:
        ConfigError: a group of one under `singleton="raw"`: it has no second best.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    if bool(groups.raw_G.any()):
        raise ConfigError("advantage singleton='raw' and a group of one: grpo_passk needs a second best; use 'zero'")
    best_S = valid_S & (groups.reward_S == groups.max_G[groups.index_S])
    alone_S = best_S & (groups.sum_G(best_S.double()) == 1)[groups.index_S]
    second_S = groups.extreme_G("amax", valid_S & ~best_S)[groups.index_S]
    return groups.silence(torch.where(alone_S, groups.reward_S - second_S, 0.0) / _scale(groups, config))


def reinforce_plus_plus_baseline(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """v = r - group mean, whitened over all tokens of the batch: (v - mean) / sqrt(var + 1e-8), var unbiased.

    In verl a group of equal rewards ends at minus the batch mean over the deviation; here it stays at exactly 0. It
    still counts in that mean and deviation. Source: REINFORCE++ (Hu et al. 2025).
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    length_S = _valid_lengths("reinforce_plus_plus_baseline", groups, lengths_S)
    tokens = length_S.sum()
    value_S = groups.from_mean_S()
    centred_S = value_S - (length_S * value_S).sum() / tokens.clamp(min=1)
    variance = (length_S * centred_S.square()).sum() / (tokens - 1).clamp(min=1)
    return groups.silence(centred_S * torch.rsqrt(variance + 1e-8))


def _scale(groups: Groups, config: AdvantageConfig) -> torch.Tensor | float:
    """Return what `std` divides deviations by: [S], or a scalar."""
    if config.std == "none":
        return 1.0
    if config.std == "batch":
        return groups.batch_std(config.std_correction) + config.eps
    return groups.std_G(config.std_correction)[groups.index_S] + config.eps


def _valid_lengths(estimator: str, groups: Groups, lengths_S: torch.Tensor | None) -> torch.Tensor:
    if lengths_S is None:
        raise ConfigError(f"advantage estimator {estimator!r} weighs by tokens: pass lengths_S")
    return torch.where(groups.valid_S, lengths_S.double(), 0.0)
