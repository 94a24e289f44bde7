"""Advantages: one number per sequence, or per token, from the rewards of sequences, relative to their group.

Every estimator has the signature `(rewards_S, group_S, valid_S, config, lengths_S=None) -> advantages_S`;
`hwgrpo/catalog.py` lists them by name. One with the decorator `@token_level`, or that is given `kl_R`, returns one
advantage per response token instead, `advantages_R`. Groups may be ragged and in any order. Invalid sequences get
advantage 0 and enter no statistic. A group whose valid rewards are all equal gets exactly 0, decided by max == min: the
standard deviation of equal numbers is often not 0 in floating point, and dividing rounding noise by it would make a
gradient out of nothing. Statistics are fp64.

Statistics over the batch (`std="batch"`, `gpg`, `reinforce_plus_plus_baseline`) cover the sequences passed in: pass
those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch

from hwgrpo.algorithms.groups import Groups
from hwgrpo.algorithms.token_advantages import (
    TokenProbs,
    is_token_level,
    one_step_each,
    required_token_probs,
    step_lengths,
    step_places,
    sum_before,
    takes,
    token_level,
)
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.own_copies import own_copy
from hwgrpo.support.torch_settings import with_kept_torch_settings
from hwgrpo.user_code import names_a_file
from hwgrpo.values import StepRewards

SMALL = 1e-8
"""Added to the sum of weights that a token's baseline is divided by."""


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
    return groups.zero_without_signal(groups.from_mean_S() * factor_S)


def remax(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    greedy_S: torch.Tensor,
    kl_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reward minus that of the greedy response to the same prompt. Source: ReMax (Li et al. 2023).

    A group of equal rewards has a signal where the greedy response has another one. Where the greedy response has no
    reward, the baseline is the mean of the group.

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        greedy_S: [S] fp64 reward of the greedy response to each sequence's prompt; NaN where it has none.
        kl_R: [R] the KL of each token times its coefficient, whose sums `rewards_S` are less of. A token then has the
            KL from itself on, and the result is [R].
    """
    has_greedy_S = ~greedy_S.isnan()
    reward_S = Groups(rewards_S, group_S, valid_S).reward_S
    others = Groups(rewards_S, group_S, valid_S & ~has_greedy_S, config.singleton)
    from_greedy_S = torch.where(valid_S & has_greedy_S, reward_S - greedy_S, 0.0).float()
    advantages_S = torch.where(has_greedy_S, from_greedy_S, others.zero_without_signal(others.from_mean_S()))
    if kl_R is None:
        return advantages_S
    lengths_S = _lengths("remax", lengths_S)
    advantages_R = torch.repeat_interleave(advantages_S.double(), lengths_S) + sum_before(kl_R, lengths_S)
    trained_S = others.has_signal_S | (valid_S & has_greedy_S)
    return torch.where(torch.repeat_interleave(trained_S, lengths_S), advantages_R, 0.0).float()


def online_rft(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    threshold: Annotated[float, Limits()] = 0.5,
) -> torch.Tensor:
    """1 where the reward is above the threshold, else 0: only correct responses are trained, all alike.

    Source: online rejection sampling fine-tuning, DeepSeekMath (Shao et al. 2024, section 5.2.1).
    """
    groups = Groups(rewards_S, group_S, valid_S)
    return (valid_S & (groups.reward_S > threshold)).float()


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
    return groups.zero_without_signal(groups.deviation_S(baseline_G))


def gpg(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha (r - mean), alpha = sequences / sequences with a reward other than 0, over the batch.

    Source: GPG (Chu et al. 2025), with verl's alpha, which is not the paper's, and f_norm = 1.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    alpha = valid_S.sum() / groups.reward_S.count_nonzero().clamp(min=1)
    return groups.zero_without_signal(alpha * groups.from_mean_S())


def grpo_passk(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Only the best of a group learns: by its lead over the second best, scaled as in `grpo`.

    A tie for the best has no lead: all zero. Without `std` its expected gradient is that of the best reward of a group,
    not of the mean reward, which need not grow. Source: arXiv 2503.19595, as in verl.

    Raises:
        ConfigError: a group of one under `singleton="raw"`: it has no second best.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    if bool(groups.raw_G.any()):
        raise ConfigError("advantage singleton='raw' and a group of one: grpo_passk needs a second best; use 'zero'")
    best_S = valid_S & (groups.reward_S == groups.max_G[groups.index_S])
    alone_S = best_S & (groups.sum_G(best_S.double()) == 1)[groups.index_S]
    second_S = groups.extreme_G("amax", valid_S & ~best_S)[groups.index_S]
    return groups.zero_without_signal(torch.where(alone_S, groups.reward_S - second_S, 0.0) / groups.scale(config))


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
    return groups.zero_without_signal(_whitened(groups.from_mean_S(), length_S))


def reinforce_plus_plus(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    kl_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reward, whitened over all tokens of the batch as in `reinforce_plus_plus_baseline`; groups do not count.

    All zero where all rewards of the batch are equal. Source: REINFORCE++ (Hu et al. 2025), with discount 1.

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        kl_R: [R] the KL of each token times its coefficient, whose sums `rewards_S` are less of. A token then has the
            reward less the KL from itself on, and the result is [R].
    """
    batch = Groups(rewards_S, torch.zeros_like(group_S), valid_S, config.singleton)
    length_S = _valid_lengths("reinforce_plus_plus", batch, lengths_S)
    if kl_R is None:
        return batch.zero_without_signal(_whitened(batch.reward_S, length_S))
    lengths_S = _lengths("reinforce_plus_plus", lengths_S)
    valid_R = torch.repeat_interleave(valid_S, lengths_S)
    to_go_R = torch.repeat_interleave(batch.reward_S, lengths_S) + sum_before(kl_R, lengths_S)
    known = to_go_R[valid_R]
    differ = len(known) > 0 and bool(known.max() > known.min())
    if not differ:
        return torch.zeros(len(to_go_R))
    return torch.where(valid_R, _whitened(to_go_R, valid_R.double()), 0.0).float()


def max_rl(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """(r - mean) / mean: a group that rarely succeeds weighs more. Source: MaxRL (arXiv 2602.02710).

    Raises:
        DataError: a negative reward, whose group has no rate of success.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    if bool((groups.reward_S < 0).any()):
        raise DataError(
            f"algorithm.advantage.name=max_rl and a reward of {groups.reward_S.min().item():g}: it divides by the mean "
            "reward of a group, so rewards must not be negative; shift them, or use another estimator"
        )
    mean_G = groups.sum_G(groups.reward_S) / groups.size_G.clamp(min=1)
    divisor_G = torch.where(groups.raw_G | (mean_G == 0), 1.0, mean_G)
    return groups.zero_without_signal(groups.from_mean_S() / divisor_G[groups.index_S])


def gdpo(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    parts: Mapping[str, tuple[float, torch.Tensor]],
    per_response: Literal[0, 1] = 0,
) -> torch.Tensor:
    """`grpo` of each reward function by itself, summed by weight, then whitened over the batch.

    So that no reward drowns the others. A reward that is missing (NaN) for a sample counts in none of its group's
    statistics and adds 0. Source: GDPO (arXiv 2601.05242), whitened over all tokens as in verl, over responses with
    `per_response=1` as in TRL.

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators; the summed rewards only mark groups
            without signal.
        parts: reward function -> its weight and its rewards [S].
        per_response: 0: whitening counts a response as often as it has tokens; 1: once, and it adds `eps` to the
            standard deviation.
    """
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    length_S = _valid_lengths("gdpo", groups, lengths_S)
    sum_S, signal_S = torch.zeros_like(groups.reward_S), torch.zeros_like(valid_S)
    for weight, part_S in parts.values():
        part = Groups(part_S, group_S, valid_S & ~part_S.isnan(), config.singleton)
        advantage_S = part.from_mean_S() / part.scale(config)
        has_signal_S = (part.signal_G | part.raw_G)[part.index_S] & part.valid_S
        sum_S += weight * torch.where(has_signal_S, advantage_S, 0.0)
        signal_S |= has_signal_S
    if per_response:
        whitened_S = _whitened_responses(sum_S, valid_S, config)
    else:
        whitened_S = _whitened(sum_S, length_S)
    return torch.where(signal_S, whitened_S, 0.0).float()


@token_level
def process(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    steps: StepRewards,
) -> torch.Tensor:
    """Sum the normalised rewards of the steps that end at a token or after it; [R] fp32.

    A step's reward is normalised as a response's by `grpo`, over all steps of its group. A group whose steps all have
    the same reward gets exactly 0. Source: DeepSeekMath (Shao et al. 2024, section 4.1.3).

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        steps: the rewards of the steps of all responses.
    """
    counts_S = steps.offsets.diff()
    sequence_K, place_K = step_places(steps)
    groups = Groups(steps.rewards, group_S[sequence_K], valid_S[sequence_K], config.singleton)
    normalised_K = groups.zero_without_signal(groups.from_mean_S() / groups.scale(config))
    padded_SM = torch.zeros(len(counts_S), int(counts_S.max()) if len(counts_S) else 0, dtype=torch.float64)
    padded_SM[sequence_K, place_K] = normalised_K.double()
    to_go_K = padded_SM.flip(1).cumsum(1).flip(1)[sequence_K, place_K]
    return torch.repeat_interleave(to_go_K, step_lengths(steps)).float()


@token_level
def optimal_token_baseline(
    rewards_S: torch.Tensor,
    group_S: torch.Tensor,
    valid_S: torch.Tensor,
    config: AdvantageConfig,
    lengths_S: torch.Tensor | None = None,
    *,
    token_probs: TokenProbs,
) -> torch.Tensor:
    """Subtract the mean reward at a token's position, weighted by the squared gradient norm until there; [R] fp32.

    A token adds `1 - 2 p + sum_v p_v^2`, the squared norm of the gradient of its log-prob with respect to the logits.
    The mean is over the responses of the group that have a token at the position; where that is one, it is 0. Source:
    optimal token baseline, as verl's `compute_optimal_token_baseline_advantage` without rollout weights, where a group
    of equal rewards does not get exactly 0.

    Args:
        rewards_S, group_S, valid_S, config, lengths_S: as for all estimators.
        token_probs: of the response tokens, under the old policy.
    """
    if lengths_S is None:
        raise ConfigError("advantage estimator 'optimal_token_baseline' has one advantage per token: pass lengths_S")
    groups = Groups(rewards_S, group_S, valid_S, config.singleton)
    most = int(lengths_S.max()) if len(lengths_S) else 0
    sequence_R = torch.repeat_interleave(lengths_S)
    place_R = torch.arange(len(sequence_R)) - (lengths_S.cumsum(0) - lengths_S)[sequence_R]
    is_token_ST = torch.arange(most) < torch.where(valid_S, lengths_S, 0)[:, None]
    norm_R = 1 - 2 * token_probs.logprobs.double().exp() + token_probs.square_sums.double()
    norm_ST = torch.zeros(len(lengths_S), most, dtype=torch.float64)
    norm_ST[sequence_R, place_R] = norm_R.clamp(min=0)  # rounding can make it negative
    weight_ST = norm_ST.cumsum(1) * is_token_ST
    baseline_GT = groups.sum_G(weight_ST * groups.reward_S[:, None]) / (groups.sum_G(weight_ST) + SMALL)
    baseline_GT[groups.sum_G(is_token_ST.double()) == 1] = 0
    advantage_R = groups.reward_S[sequence_R] - baseline_GT[groups.index_S[sequence_R], place_R]
    return torch.where(groups.has_signal_S[sequence_R], advantage_R, 0.0).float()


def _whitened_responses(value_S: torch.Tensor, valid_S: torch.Tensor, config: AdvantageConfig) -> torch.Tensor:
    """Return (v - mean) / (std + eps) over the valid responses; 0 where these do not differ, as a single one."""
    known = value_S[valid_S]
    if not len(known) or bool(known.max() == known.min()):
        return torch.zeros_like(value_S)
    return (value_S - known.mean()) / (known.std() + config.eps)


def _whitened(value_S: torch.Tensor, length_S: torch.Tensor) -> torch.Tensor:
    """Return (v - mean) / sqrt(var + 1e-8) over all tokens, of which `length_S` have the same value."""
    tokens = length_S.sum()
    centred_S = value_S - (length_S * value_S).sum() / tokens.clamp(min=1)
    variance = (length_S * centred_S.square()).sum() / (tokens - 1).clamp(min=1)
    return centred_S * torch.rsqrt(variance + 1e-8)


def _valid_lengths(estimator: str, groups: Groups, lengths_S: torch.Tensor | None) -> torch.Tensor:
    return torch.where(groups.valid_S, _lengths(estimator, lengths_S).double(), 0.0)


def _lengths(estimator: str, lengths_S: torch.Tensor | None) -> torch.Tensor:
    if lengths_S is None:
        raise ConfigError(f"advantage estimator {estimator!r} weighs by tokens: pass lengths_S")
    return lengths_S
