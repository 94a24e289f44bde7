"""Policy losses per token: PPO clip, GSPO, GMPO, VESPO, TOPR, CISPO, SAPO, GPG, DPPO, DRO, KL-Cov, Clip-Cov.

Throughout, d = logprob - old_logprob is the log-ratio and rho = e^d the ratio. On policy the old log-prob is the
current one without its gradient: d is 0, rho is 1, and clipping cannot happen, so it is skipped. Metrics that are 0
by definition on policy are then left out.

A further loss is a function of (`SurrogateInput`, `LossConfig`) with the decorator `policy_loss`, and its line in
`POLICY_LOSSES` of `hwgrpo/catalog.py`, which declares the settings that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch

from hwgrpo.algorithms.scope import policy_loss, sequence_sum
from hwgrpo.algorithms.token_selection import largest_covariances, some_covariances
from hwgrpo.config.bound_arguments import Below
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import LossConfig

Metrics = dict[str, torch.Tensor]

GSPO_MAX_LOG_RATIO = 10.0
"""verl's bound on GSPO's log-ratio; a sequence mean reaches it only when training has gone wrong already."""
SMALL = 1e-8
"""Added to probabilities before their logarithm, as verl does."""


@dataclass(frozen=True)
class SurrogateInput:
    """Inputs of a policy loss, for N rows."""

    logprob: torch.Tensor
    """[N] fp32, with gradient."""
    log_ratio: torch.Tensor
    """[N] logprob - old_logprob, with gradient."""
    on_policy: bool
    """True when there is no old log-prob: the log-ratio is zero and only carries the gradient."""
    advantage: torch.Tensor
    """[N]."""
    cu_seqlens: torch.Tensor | None
    """[S + 1] row bounds of the sequences; for losses of scope `sequence` and `batch`."""
    selected: torch.Tensor | None = None
    """[N] 1 where the loss's own selection chose the token, else 0; None for losses without one."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """name -> [N]: further values of tokens that an engine of one's own returned (`Responses.token_extras`)."""


@policy_loss("token")
def ppo_clip(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), at most -dual_clip A where A < 0.

    Sources: Schulman et al. 2017, equation 7; separate bounds: DAPO (Yu et al. 2025, section 3.1); dual clip: Ye et
    al. 2020, equation 5. The formulas are verl's `vanilla` loss.
    """
    if x.on_policy:
        return -x.advantage * x.log_ratio.exp(), {}
    log_ratio = clamp_log_ratio(x.log_ratio, config)
    ratio = log_ratio.exp()
    loss, metrics = clip_ratio(ratio, x.advantage, config, config.delta)
    if config.dual_clip is not None:
        # |A| serves both signs: where A >= 0 the loss is never positive, so this bound never binds.
        ceiling = config.dual_clip * x.advantage.abs()
        metrics["pg_clipfrac_lower"] = (loss > ceiling).to(loss.dtype)
        loss = torch.minimum(loss, ceiling)
    return loss, metrics | {"ppo_kl": -log_ratio.detach(), "ratio": ratio.detach()}


def clamp_log_ratio(log_ratio: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Clamp log-ratios to plus or minus `config.log_ratio_clamp`, if set."""
    bound = config.log_ratio_clamp
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def clip_ratio(
    ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig, delta: float | None = None
) -> tuple[torch.Tensor, Metrics]:
    """Return PPO's clipped loss and its clip metrics; verl's `pg_clipfrac` is TRL's `clip_ratio/region`.

    `delta` also caps the ratio that is not clipped (INTELLECT-2, Prime Intellect 2025), as in TRL: with a negative
    advantage, and with a positive one where it is below 1 + clip_high, whose place it then takes.
    """
    unclipped = -advantage * (ratio if delta is None else ratio.clamp(max=delta))
    bounded = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = bounded > unclipped
    metrics = {
        "pg_clipfrac": clipped.to(ratio.dtype),
        "clip_ratio/low": (clipped & (advantage < 0)).to(ratio.dtype),
        "clip_ratio/high": (clipped & (advantage > 0)).to(ratio.dtype),
    }
    return torch.maximum(unclipped, bounded), metrics


@policy_loss("sequence")
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
    loss, metrics = clip_ratio(ratio, x.advantage, config, config.delta)
    return loss, metrics | {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}


@policy_loss("sequence", weighs_sequences=True, needs_sequence_advantages=True)
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


@policy_loss("sequence", needs_sequence_advantages=True)
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


@policy_loss("token")
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


@policy_loss("token")
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


@policy_loss("token", on_policy=("tau_pos", "tau_neg"))
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


@policy_loss("token")
def gpg(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A logprob: the plain policy gradient, no ratio. Source: GPG (Chu et al. 2025, equation 4)."""
    return -x.advantage * x.logprob, {} if x.on_policy else {"ppo_kl": -x.log_ratio.detach()}


@policy_loss("token")
def dppo_tv(
    x: SurrogateInput, config: LossConfig, *, cap: Annotated[float, Limits(above=0)] = 20.0
) -> tuple[torch.Tensor, Metrics]:
    """-A sg(min(rho, cap)) logprob where the probability has moved by at most clip_high (A > 0) or clip_low, else 0.

    The probability of a token and that of all others form a binary distribution. Only moves in the advantage's
    direction count: up by more than clip_high where A > 0, down by more than clip_low where not. Source: DPPO (arXiv
    2602.04879), binary total variation, as in verl.
    """
    if x.on_policy:
        return -x.advantage * x.logprob, {}
    moved = x.logprob.detach().exp() - (x.logprob - x.log_ratio).detach().exp()
    kept = torch.where(x.advantage > 0, moved <= config.clip_high, moved >= -config.clip_low)
    return _kept_only(x, config, kept, cap)


@policy_loss("token")
def dppo_kl(
    x: SurrogateInput, config: LossConfig, *, cap: Annotated[float, Limits(above=0)] = 20.0
) -> tuple[torch.Tensor, Metrics]:
    """As `dppo_tv`, with the binary KL(old || current) as the measure of the move.

    Source: DPPO (arXiv 2602.04879), binary KL, as in verl.
    """
    if x.on_policy:
        return -x.advantage * x.logprob, {}
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    new, old = x.logprob.detach().exp(), (x.logprob - x.log_ratio).detach().exp()
    kl = -old * log_ratio + (1 - old) * ((1 - old + SMALL) / (1 - new + SMALL)).log()
    up = (kl <= config.clip_high) | (new <= old)
    down = (kl <= config.clip_low) | (new >= old)
    return _kept_only(x, config, torch.where(x.advantage > 0, up, down), cap)


def _kept_only(x: SurrogateInput, config: LossConfig, kept: torch.Tensor, cap: float) -> tuple[torch.Tensor, Metrics]:
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    ratio = log_ratio.exp()
    kept = kept.to(ratio.dtype)
    loss = -x.advantage * ratio.clamp(max=cap) * kept * x.logprob
    return loss, {"pg_clipfrac": 1 - kept, "ppo_kl": -log_ratio, "ratio": ratio}


@policy_loss("token", penalizes=True)
def dro(
    x: SurrogateInput, config: LossConfig, *, beta: Annotated[float, Limits(at_least=0)] = 0.1
) -> tuple[torch.Tensor, Metrics]:
    """-A logprob + beta/2 d^2: a quadratic penalty takes the place of the clip.

    Source: DRO (Richemond et al. 2024), as in verl, whose `dro_beta` has no default.
    """
    loss = -x.advantage * x.logprob + 0.5 * beta * x.log_ratio.square()
    return loss, {} if x.on_policy else {"ppo_kl": -x.log_ratio.detach()}


@policy_loss("token", selects=largest_covariances)
def kl_cov(
    x: SurrogateInput,
    config: LossConfig,
    *,
    share: Annotated[float, Limits(above=0, at_most=1)] = 2e-4,
    coef: Annotated[float, Limits(at_least=0)] = 0.1,
) -> tuple[torch.Tensor, Metrics]:
    """-A rho, and coef |d| more for the `share` of tokens with the largest covariance; nothing is clipped.

    They are selected among all tokens of the update before it (`token_selection.py`). Source: KL-Cov (Cui et al. 2025),
    as in verl.
    """
    assert x.selected is not None, "kl_cov needs the tokens that were selected"
    ratio = x.log_ratio.exp()
    loss = -x.advantage * ratio + coef * x.selected * x.log_ratio.abs()
    metrics = {"selected_tokens": x.selected}
    return loss, metrics if x.on_policy else metrics | {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}


@policy_loss("token", selects=some_covariances, on_policy=("share", "low", "high"))
def clip_cov(
    x: SurrogateInput,
    config: LossConfig,
    *,
    share: Annotated[float, Limits(above=0, at_most=1)] = 2e-4,
    low: Annotated[float, Limits(), Below("high")] = 1.0,
    high: Annotated[float, Limits()] = 5.0,
) -> tuple[torch.Tensor, Metrics]:
    """PPO's clipped loss, 0 for the tokens that chance selects of those with a covariance between `low` and `high`.

    There is no dual clip. Source: Clip-Cov (Cui et al. 2025), as in verl.
    """
    assert x.selected is not None, "clip_cov needs the tokens that were selected"
    ratio = x.log_ratio.exp()
    loss, metrics = (-x.advantage * ratio, {}) if x.on_policy else clip_ratio(ratio, x.advantage, config)
    if not x.on_policy:
        metrics |= {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}
    return loss * (1 - x.selected), metrics | {"selected_tokens": x.selected}
