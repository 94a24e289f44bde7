"""Policy losses besides PPO clip: GSPO, GMPO, VESPO (by sequence), CISPO, SAPO, TOPR, GPG (by token).

Notation and the treatment of on-policy rows are those of `surrogates.py`.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch

from hwgrpo.algorithms.scope import scoped, sequence_sum
from hwgrpo.algorithms.surrogates import Metrics, SurrogateInput, clamp_log_ratio, clip_ratio
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import LossConfig

GSPO_MAX_LOG_RATIO = 10.0
"""verl's bound on GSPO's log-ratio; a sequence mean reaches it only when training has gone wrong already."""


@scoped("sequence", of_ratio=("clip_low", "clip_high", "delta"))
def gspo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """PPO clip on the geometric mean of a sequence's ratios, each token carrying its share of the gradient.

    log rho_t = min(logprob_t - sg(logprob_t) + sg(mean of d over the sequence), 10). Neither `log_ratio_clamp` nor
    `dual_clip` applies. Aggregate with seq-mean-token-mean. Source: Zheng et al. 2025, section 4.3 (GSPO-token).
    """
    if x.on_policy:
        return -x.advantage * x.log_ratio.exp(), {}
    assert x.cu_seqlens is not None, "gspo needs the row bounds of the sequences"
    with torch.no_grad():
        sum_S, sequence_N = sequence_sum(x.log_ratio, x.cu_seqlens)
        mean_N = (sum_S / x.cu_seqlens.diff().clamp(min=1))[sequence_N]
    log_ratio = (x.logprob - x.logprob.detach() + mean_N).clamp(max=GSPO_MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    loss, metrics = clip_ratio(ratio, x.advantage, config)
    return loss, metrics | {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}


@scoped("sequence", of_ratio=("clip_low", "clip_high"), weighs_sequences=True)
def gmpo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A rho of a sequence, rho the geometric mean of token ratios that were clipped first.

    Each token's log-ratio is clipped to [-clip_low, clip_high], in the advantage's direction only (log space, so verl's
    and TRL's 0.4 is a ratio of 1.49). Aggregate with seq-mean-token-mean. A correction weighs a sequence by the
    geometric mean of its tokens' weights, as in verl. Source: GMPO (Zhao et al. 2025).
    """
    if x.on_policy:
        return -x.advantage * x.log_ratio.exp(), {}
    assert x.cu_seqlens is not None, "gmpo needs the row bounds of the sequences"
    sign = x.advantage.sign()
    bounded = x.log_ratio.clamp(-config.clip_low, config.clip_high)
    log_ratio = sign * torch.minimum(sign * x.log_ratio, sign * bounded)
    with torch.no_grad():
        sum_S, sequence_N = sequence_sum(log_ratio, x.cu_seqlens)
        mean_N = (sum_S / x.cu_seqlens.diff().clamp(min=1))[sequence_N]
    ratio = (log_ratio - log_ratio.detach() + mean_N).exp()
    clipped = x.log_ratio != bounded
    metrics = {
        "pg_clipfrac": clipped.to(ratio.dtype),
        "clip_ratio/low": (clipped & (x.advantage < 0)).to(ratio.dtype),
        "clip_ratio/high": (clipped & (x.advantage > 0)).to(ratio.dtype),
        "ppo_kl": -x.log_ratio.detach(),
        "ratio": ratio.detach(),
    }
    return -x.advantage * ratio, metrics


@scoped("sequence", of_ratio=("log_ratio_clamp", "k_pos", "lambda_pos", "k_neg", "lambda_neg"))
def vespo(
    x: SurrogateInput,
    config: LossConfig,
    *,
    k_pos: Annotated[float, Limits(at_least=0)] = 2.0,
    lambda_pos: Annotated[float, Limits(at_least=0)] = 3.0,
    k_neg: Annotated[float, Limits(at_least=0)] = 3.0,
    lambda_neg: Annotated[float, Limits(at_least=0)] = 2.0,
) -> tuple[torch.Tensor, Metrics]:
    """-sg(phi(w)) A logprob, phi(w) = w^k e^(lambda (1 - w)), w the ratio of the sequence (product over tokens).

    k and lambda are `k_pos` and `lambda_pos` where A >= 0, else `k_neg` and `lambda_neg`. log w is kept within
    [ln 1e-8, 20]. Source: VESPO (2026), as in TRL.
    """
    if x.on_policy:
        return -x.advantage * x.logprob, {}
    assert x.cu_seqlens is not None, "vespo needs the row bounds of the sequences"
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    sum_S, sequence_N = sequence_sum(log_ratio, x.cu_seqlens)
    log_w = sum_S.clamp(math.log(1e-8), 20)[sequence_N]
    raises = x.advantage >= 0
    k = torch.full_like(log_w, k_neg).masked_fill_(raises, k_pos)
    slope = torch.full_like(log_w, max(lambda_neg, 1e-4)).masked_fill_(raises, max(lambda_pos, 1e-4))
    phi = (slope + k * log_w - slope * log_w.exp()).exp()
    return -phi * x.advantage * x.logprob, {"ppo_kl": -log_ratio, "ratio": log_ratio.exp()}


@scoped("token", of_ratio=("log_ratio_clamp",))
def topr(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A logprob where A > 0, else -sg(min(rho, 1)) A logprob: what is learned from is not weighed, what is not is.

    Source: TOPR (Le Roux et al. 2025). There, and in ROLL, the sign of the reward decides, and in the paper rho is that
    of the response; here it is the sign of the advantage, and rho that of the token.
    """
    if x.on_policy:
        return -x.advantage * x.logprob, {}
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    ratio = log_ratio.exp()
    weight = torch.where(x.advantage > 0, 1.0, ratio.clamp(max=1))
    return -weight * x.advantage * x.logprob, {"ppo_kl": -log_ratio, "ratio": ratio}


@scoped("token", of_ratio=("clip_low", "clip_high", "log_ratio_clamp"))
def cispo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-sg(clamp(rho, 1 - clip_low, 1 + clip_high)) A logprob: clipped weights, but no token loses its gradient.

    TRL caps rho at an absolute `epsilon_high` without a lower bound: clip_low=1, clip_high=epsilon_high-1 is that.
    Source: MiniMax-M1 (2025), section 3.1.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if x.on_policy:
        # The clamp of 1, which a cap below 1 lowers.
        metrics = {} if low <= 1 <= high else _cispo_clips(torch.ones_like(x.advantage), x.advantage, low, high)
        return -min(max(1.0, low), high) * x.advantage * x.logprob, metrics
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    ratio = log_ratio.exp()
    metrics = _cispo_clips(ratio, x.advantage, low, high) | {"ppo_kl": -log_ratio, "ratio": ratio}
    return -ratio.clamp(low, high) * x.advantage * x.logprob, metrics


def _cispo_clips(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> Metrics:
    """Return where a ratio was clamped, and where a cap took some of a positive advantage, as TRL counts it."""
    return {
        "pg_clipfrac": ((ratio < low) | (ratio > high)).to(ratio.dtype),
        "clip_ratio/capped": ((ratio > high) & (advantage > 0)).to(ratio.dtype),
    }


@scoped("token", of_ratio=("log_ratio_clamp",))
def sapo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A sigmoid(tau (rho - 1)) 4/tau, tau = tau_pos where A > 0, else tau_neg: a soft gate instead of a clip.

    Aggregate with seq-mean-token-mean. Source: SAPO (Gao et al. 2025, equation 6).
    """
    log_ratio = x.log_ratio if x.on_policy else clamp_log_ratio(x.log_ratio, config)
    ratio = log_ratio.exp()
    # where(condition, float, float) would round both to fp32.
    tau = torch.full_like(x.advantage, config.tau_neg).masked_fill_(x.advantage > 0, config.tau_pos)
    loss = torch.sigmoid(tau * (ratio - 1)) * (-4 * x.advantage / tau)
    return loss, {} if x.on_policy else {"ppo_kl": -log_ratio.detach(), "ratio": ratio.detach()}


@scoped("token")
def gpg(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A logprob: the plain policy gradient, no ratio. Source: GPG (Chu et al. 2025, equation 4)."""
    return -x.advantage * x.logprob, {} if x.on_policy else {"ppo_kl": -x.log_ratio.detach()}
