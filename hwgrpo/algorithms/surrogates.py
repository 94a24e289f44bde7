"""The policy losses, per token: functions of the log-prob whose gradient is the policy gradient.

Throughout, d = logprob - old_logprob is the log-ratio and rho = e^d the ratio. On policy the old log-prob is the
current one without its gradient: d is 0, rho is 1, and clipping cannot happen, so it is skipped. Metrics that are 0
by definition on policy are then left out.

A further loss is a `Scoped` function of (`SurrogateInput`, `LossConfig`) added to `POLICY_LOSSES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hwgrpo.algorithms.scope import scoped, sequence_sum
from hwgrpo.config.schema import LossConfig

Metrics = dict[str, torch.Tensor]

GSPO_MAX_LOG_RATIO = 10.0
"""verl's bound on GSPO's log-ratio; a sequence mean reaches it only when training has gone wrong already."""


@dataclass(frozen=True)
class SurrogateInput:
    """What a policy loss may look at, for N rows."""

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


@scoped("token")
def ppo_clip(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), at most -dual_clip A where A < 0.

    Sources: Schulman et al. 2017, equation 7; separate bounds: DAPO (Yu et al. 2025, section 3.1); dual clip: Ye et
    al. 2020, equation 5. The formulas are verl's `vanilla` loss.
    """
    if x.on_policy:
        return -x.advantage * x.log_ratio.exp(), {}
    log_ratio = _clamped(x.log_ratio, config)
    ratio = log_ratio.exp()
    loss, metrics = _clipped(ratio, x.advantage, config)
    if config.dual_clip is not None:
        # |A| serves both signs: where A >= 0 the loss is never positive, so this bound never binds.
        ceiling = config.dual_clip * x.advantage.abs()
        metrics["pg_clipfrac_lower"] = (loss > ceiling).to(loss.dtype)
        loss = torch.minimum(loss, ceiling)
    return loss, metrics | {"ppo_kl": -log_ratio.detach(), "ratio": ratio.detach()}


@scoped("sequence")
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
    loss, metrics = _clipped(ratio, x.advantage, config)
    return loss, metrics | {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}


@scoped("token")
def cispo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-sg(clamp(rho, 1 - clip_low, 1 + clip_high)) A logprob: clipped weights, but no token loses its gradient.

    TRL caps rho at an absolute `epsilon_high` without a lower bound: clip_low=1, clip_high=epsilon_high-1 is that.
    Source: MiniMax-M1 (2025), section 3.1.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if x.on_policy:
        # The clamp of 1, which a cap below 1 lowers.
        return -min(max(1.0, low), high) * x.advantage * x.logprob, {}
    log_ratio = _clamped(x.log_ratio.detach(), config)
    ratio = log_ratio.exp()
    coefficient = ratio.clamp(low, high)
    clipped = (ratio != coefficient).to(ratio.dtype)
    return -coefficient * x.advantage * x.logprob, {"pg_clipfrac": clipped, "ppo_kl": -log_ratio, "ratio": ratio}


@scoped("token")
def sapo(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A sigmoid(tau (rho - 1)) 4/tau, tau = tau_pos where A > 0, else tau_neg: a soft gate instead of a clip.

    Aggregate with seq-mean-token-mean. Source: SAPO (Gao et al. 2025, equation 6).
    """
    log_ratio = x.log_ratio if x.on_policy else _clamped(x.log_ratio, config)
    ratio = log_ratio.exp()
    # where(condition, float, float) would round both to fp32.
    tau = torch.full_like(x.advantage, config.tau_neg).masked_fill_(x.advantage > 0, config.tau_pos)
    loss = torch.sigmoid(tau * (ratio - 1)) * (-4 * x.advantage / tau)
    return loss, {} if x.on_policy else {"ppo_kl": -log_ratio.detach(), "ratio": ratio.detach()}


@scoped("token")
def gpg(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """-A logprob: the plain policy gradient, no ratio. Source: GPG (Chu et al. 2025, equation 4)."""
    return -x.advantage * x.logprob, {} if x.on_policy else {"ppo_kl": -x.log_ratio.detach()}


def _clamped(log_ratio: torch.Tensor, config: LossConfig) -> torch.Tensor:
    bound = config.log_ratio_clamp
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def _clipped(ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Return PPO's pessimistic maximum and where the clip decided: verl's pg_clipfrac is TRL's clip_ratio/region."""
    unclipped = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = bounded > unclipped
    metrics = {
        "pg_clipfrac": clipped.to(ratio.dtype),
        "clip_ratio/low": (clipped & (advantage < 0)).to(ratio.dtype),
        "clip_ratio/high": (clipped & (advantage > 0)).to(ratio.dtype),
    }
    return torch.maximum(unclipped, bounded), metrics
