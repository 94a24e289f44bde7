"""Correcting for the gap between the policy as the rollout engine ran it and as the trainer computes it.

Throughout, the log-ratio is `old_logprob - rollout_logprob` (on policy: the current log-prob takes the place of the
old one). Weights carry no gradient: they change the measure, not the objective. Truncation is TIS (Yao et al. 2025,
Your Efficient RL Framework Secretly Brings You Off-Policy RL Training), masking is IcePop (Ling team 2025, Every
Step Evolves); the names are TRL's `vllm_importance_sampling_mode`.

Rejection leaves tokens and sequences out; names and bounds are verl's `rollout_rs`. With x the log-ratio of a token the
statistics are k1 = -x, k2 = x^2 / 2 and k3 = e^x - 1 - x, of each token, or summed, averaged or the largest over its
sequence. A `veto` leaves out a sequence in which the trainer's probability of a token is below that share of the
engine's (slime's `rs_veto_threshold`). `hwgrpo/config/algorithm_rules.py` checks names and bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hwgrpo.algorithms.scope import Scope, Scoped, load_scoped, scoped, sequence_sum, widest
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.catalog import CORRECTIONS, SAFE_LOG_RATIO
from hwgrpo.config.schema import CorrectionConfig
from hwgrpo.errors import ConfigError

SMALLEST_MEAN = 1e-8
"""Mean of weights up to which they are not divided by it, as in verl."""
SMALLEST_WEIGHT = 1e-10
"""Added to weights before their logarithm, as in verl: a token with weight 0 does not make that of its sequence 0."""
ROUNDING = 1e-4
"""Standard deviation of log-ratios up to which they are rounding, and a line fitted to them means nothing."""
STATISTICS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: x.expm1() - x,
}


def correction_weights(
    log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return the importance weight of each row, detached.

    Args:
        log_ratio_N: [N] old_logprob - rollout_logprob.
        config: which correction and its bounds.
        cu_seqlens: [S + 1] row bounds of the sequences; needed by the sequence corrections.

    Returns:
        [N], or None when there is nothing to multiply by.
    """
    correction = load_correction(config)
    with torch.no_grad():
        return correction(log_ratio_N, config, cu_seqlens)


def load_correction(config: CorrectionConfig, weighs_sequences: bool = False) -> Scoped[..., torch.Tensor | None]:
    """Return the correction `(log_ratio_N, config, cu_seqlens) -> weight_N` of the settings, with what it rejects.

    Args:
        config: the settings.
        weighs_sequences: whether all tokens of a sequence get the geometric mean of its weights.
    """
    correction = load_scoped(CORRECTIONS, config.name, config.kwargs, 3, "algorithm.correction")
    if not config.reject and not weighs_sequences:
        return correction

    def weight_of_kept(
        log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor | None:
        weight_N = correction(log_ratio_N, config, cu_seqlens)
        if weight_N is not None and weighs_sequences:
            weight_N = _sequence_weights(weight_N, cu_seqlens)
        if not config.reject:
            return weight_N
        kept_N = kept(log_ratio_N, config.reject, cu_seqlens)
        return kept_N if weight_N is None else weight_N * kept_N

    of_sequences: Scope = "sequence" if weighs_sequences else "token"
    return Scoped(weight_of_kept, widest(correction.scope, rejection_scope(config.reject), of_sequences))


def normalized_weights(tokens: UpdateTokens, config: CorrectionConfig, weighs_sequences: bool = False) -> torch.Tensor:
    """Return [R] the weights of an update's tokens, divided by their mean, and 0 for what is rejected.

    The mean is over tokens, or over sequences where all tokens of one have the same weight, as for verl's
    `rollout_is_batch_normalize`, which has it over a step. `weighs_sequences` is that of `load_correction`.
    """
    log_ratio_R = tokens.old_logprob_R - tokens.rollout_logprob_R
    cu_seqlens = torch.nn.functional.pad(tokens.lengths_S.cumsum(0), (1, 0))
    correction = load_correction(replace(config, reject={}))
    weight_R = correction(log_ratio_R, config, cu_seqlens)
    if weight_R is None:
        raise ConfigError(
            f"algorithm.correction.normalize=true with algorithm.correction.name={config.name!r}, which returned no "
            "weights; set normalize=false"
        )
    firsts = cu_seqlens[:-1][tokens.lengths_S > 0]
    mean = (weight_R if correction.scope == "token" else weight_R[firsts]).mean()
    if mean > SMALLEST_MEAN:
        weight_R = weight_R / mean
    if weighs_sequences:
        weight_R = _sequence_weights(weight_R, cu_seqlens)
    return weight_R * kept(log_ratio_R, config.reject, cu_seqlens) if config.reject else weight_R


@scoped("token")
def none(log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None) -> None:
    """No correction."""


@scoped("token")
def token_truncate(
    log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Each token's own ratio, cut to the bounds."""
    return _truncate(_ratio(log_ratio_N), config)


@scoped("token")
def token_mask(log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Each token's own ratio, 0 outside the bounds."""
    return _mask(_ratio(log_ratio_N), config)


@scoped("sequence")
def sequence_truncate(
    log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return the ratio of the sequence, clamped to the bounds."""
    return _truncate(_sequence_ratio(log_ratio_N, cu_seqlens), config)


@scoped("sequence")
def geometric_truncate(
    log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The geometric mean of the ratios of the sequence, clamped to the bounds (slime, ROLL)."""
    return _truncate(_geometric_ratio(log_ratio_N, cu_seqlens), config)


@scoped("sequence")
def geometric_mask(
    log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The geometric mean of the ratios of the sequence, 0 outside the bounds."""
    return _mask(_geometric_ratio(log_ratio_N, cu_seqlens), config)


@scoped("sequence")
def sequence_mask(log_ratio_N: torch.Tensor, config: CorrectionConfig, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return the ratio of the sequence, 0 outside the bounds."""
    return _mask(_sequence_ratio(log_ratio_N, cu_seqlens), config)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-SAFE_LOG_RATIO, SAFE_LOG_RATIO).exp()


def _sequence_ratio(log_ratio_N: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    assert cu_seqlens is not None, "a sequence correction needs the row bounds of the sequences"
    log_ratio_S, sequence_N = sequence_sum(log_ratio_N, cu_seqlens)
    return _ratio(log_ratio_S)[sequence_N]


def _geometric_ratio(log_ratio_N: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    assert cu_seqlens is not None, "a sequence correction needs the row bounds of the sequences"
    log_ratio_S, sequence_N = sequence_sum(log_ratio_N, cu_seqlens)
    return _ratio(log_ratio_S / cu_seqlens.diff().clamp(min=1))[sequence_N]


def _sequence_weights(weight_N: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return [N] the geometric mean of the weights of each row's sequence."""
    assert cu_seqlens is not None, "a weight of a sequence needs the row bounds of the sequences"
    log_weight_S, sequence_N = sequence_sum((weight_N + SMALLEST_WEIGHT).log(), cu_seqlens)
    return (log_weight_S / cu_seqlens.diff().clamp(min=1)).exp()[sequence_N]


def _truncate(weight_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    return weight_N.clamp(config.low, config.high)


def _mask(weight_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    return torch.where(weight_N == _truncate(weight_N, config), weight_N, 0.0)


def rejection_scope(reject: Mapping[str, Any]) -> Scope:
    """Return which rows `kept` must see at once."""
    return "token" if all(name.startswith("token_") for name in reject) else "sequence"


def kept(log_ratio_N: torch.Tensor, reject: Mapping[str, Any], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for the rows that every statistic is within its bounds for, else 0.

    Args:
        log_ratio_N: [N] old_logprob - rollout_logprob.
        reject: statistic -> its bounds, which have been checked.
        cu_seqlens: [S + 1] row bounds of the sequences; not read where the scope is `token`.

    Returns:
        [N], of the dtype of the log-ratios.
    """
    x = log_ratio_N.clamp(-SAFE_LOG_RATIO, SAFE_LOG_RATIO)
    found = torch.ones_like(x, dtype=torch.bool)
    for name, bounds in reject.items():
        if name == "veto":
            # of the log-ratio itself: the clamp would end at a share of e^-20
            found &= _over_sequences("seq_max", -log_ratio_N, cu_seqlens) <= -math.log(bounds)
            continue
        over, _, k = name.rpartition("_")
        values = STATISTICS[k](x)
        if over != "token":
            values = _over_sequences(over, values, cu_seqlens)
        if k == "k1":
            found &= (values >= math.log(bounds[0])) & (values <= math.log(bounds[1]))
        else:
            found &= values <= bounds
    return found.to(x.dtype)


def _over_sequences(over: str, values_N: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return [N] the sum, mean or maximum over each row's sequence."""
    assert cu_seqlens is not None, "a statistic of sequences needs their row bounds"
    sum_S, sequence_N = sequence_sum(values_N, cu_seqlens)
    if over == "seq_max":
        lowest_S = torch.full_like(sum_S, float("-inf"))
        return lowest_S.scatter_reduce(0, sequence_N, values_N, "amax")[sequence_N]
    if over == "seq_mean":
        sum_S = sum_S / cu_seqlens.diff().clamp(min=1)
    return sum_S[sequence_N]


def on_policy_enough(
    log_ratio_N: torch.Tensor, advantage_N: torch.Tensor, threshold: float, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return 1 where a row is kept: A >= 0, or the mean log-ratio of its sequence is at most the threshold; else 0.

    Source: DeepSeek-V3.2 (2025), equation 9, as in TRL.

    Args:
        log_ratio_N: [N] rollout_logprob - logprob, without gradient: its mean estimates KL(rollout || policy).
        advantage_N: [N].
        threshold: nats per token.
        cu_seqlens: [S + 1] row bounds of the sequences.

    Returns:
        [N], of the dtype of the log-ratios.
    """
    assert cu_seqlens is not None, "the off-policy sequence mask needs the row bounds of the sequences"
    sum_S, sequence_N = sequence_sum(log_ratio_N, cu_seqlens)
    mean_N = (sum_S / cu_seqlens.diff().clamp(min=1))[sequence_N]
    return ((advantage_N >= 0) | (mean_N <= threshold)).to(log_ratio_N.dtype)


def mismatch_sums(
    old_logprob_N: torch.Tensor,
    rollout_logprob_N: torch.Tensor,
    cu_seqlens: torch.Tensor,
    weight_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum what `mismatch_metrics` needs; sums of parts and of ranks add up.

    Args:
        old_logprob_N: [N] log-probs by the trainer.
        rollout_logprob_N: [N] log-probs by the rollout engine.
        cu_seqlens: [S + 1] row bounds of the sequences; empty ones are left out.
        weight_N: [N] the weights applied; None: the plain ratios.

    Returns:
        [15] fp64 (on the device of the inputs).
    """
    old_N, rollout_N = old_logprob_N.detach().double(), rollout_logprob_N.detach().double()
    log_ratio_N = old_N - rollout_N
    ratio_N = _ratio(log_ratio_N)
    applied_N = ratio_N if weight_N is None else weight_N.double()

    lengths_S = cu_seqlens.diff()
    filled_S = lengths_S > 0
    count_S = lengths_S.clamp(min=1)
    log_ratio_S, _ = sequence_sum(log_ratio_N, cu_seqlens)
    old_mean_S = sequence_sum(old_N, cu_seqlens)[0] / count_S
    rollout_mean_S = sequence_sum(rollout_N, cu_seqlens)[0] / count_S

    def over_sequences(values_S: torch.Tensor) -> torch.Tensor:
        return torch.where(filled_S, values_S, 0.0).sum()

    return torch.stack(
        [
            torch.ones_like(log_ratio_N).sum(),
            -log_ratio_N.sum(),
            (log_ratio_N.expm1() - log_ratio_N).sum(),
            ratio_N.square().sum(),
            applied_N.sum(),
            applied_N.square().sum(),
            filled_S.double().sum(),
            over_sequences(_ratio(log_ratio_S).square()),
            over_sequences((-old_mean_S).exp()),
            over_sequences((-rollout_mean_S).exp()),
            over_sequences((rollout_mean_S - old_mean_S).exp()),
            rollout_N.sum(),
            rollout_N.square().sum(),
            (rollout_N * log_ratio_N).sum(),
            log_ratio_N.square().sum(),
        ]
    )


def mismatch_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Turn sums into `rollout_corr/*`: the metrics that verl logs, and a line fitted to the log-ratios.

    Args:
        sums: [15] from `mismatch_sums`, added over parts and ranks.

    Returns:
        `rollout_corr/` + `kl` = mean of -log-ratio, an estimate of KL(rollout || trainer); `k3_kl`; `chi2_token` and
        `chi2_seq` = second moment of the ratio minus 1; `training_ppl`, `rollout_ppl`, `ppl_ratio` = means over
        sequences; `rollout_is_eff_sample_size` = (sum w)^2 / (n sum w^2), 1 when all weights are equal, 0 when all
        are 0; `log_ratio_slope` and `log_ratio_r2` = slope and coefficient of determination of the least-squares line
        of the log-ratio over the rollout log-prob, the latter 0 for a gap of rounding. Empty without tokens.
    """
    tokens, kl, k3, ratio2, weight, weight2, sequences, ratio2_seq, training, rollout, ppl_ratio, *fit = sums.tolist()
    if tokens == 0:
        return {}
    slope, r2 = _fit_line(tokens, fit[0], -kl, *fit[1:])
    values = {
        "kl": kl / tokens,
        "k3_kl": k3 / tokens,
        "chi2_token": ratio2 / tokens - 1,
        "chi2_seq": ratio2_seq / sequences - 1,
        "training_ppl": training / sequences,
        "rollout_ppl": rollout / sequences,
        "ppl_ratio": ppl_ratio / sequences,
        "rollout_is_eff_sample_size": weight * weight / (tokens * weight2) if weight2 > 0 else 0.0,
        "log_ratio_slope": slope,
        "log_ratio_r2": r2,
    }
    return {f"rollout_corr/{name}": value for name, value in values.items()}


def _fit_line(n: float, x: float, y: float, xx: float, xy: float, yy: float) -> tuple[float, float]:
    """Return slope and coefficient of determination of the least-squares line of y over x, given their sums.

    The slope is 0 where x is constant, the latter where y varies by no more than ROUNDING.
    """
    var_x, var_y, cov = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2, xy / n - x / n * (y / n)
    if var_x <= 0:
        return 0.0, 0.0
    return cov / var_x, 0.0 if var_y <= ROUNDING**2 else min(cov * cov / (var_x * var_y), 1.0)
