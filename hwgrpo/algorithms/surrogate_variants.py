"""Policy losses besides PPO clip, per token: GSPO, CISPO, SAPO, GPG.

Notation and the treatment of on-policy rows are those of `surrogates.py`.
"""

from __future__ import annotations

import torch

from hwgrpo.algorithms.scope import scoped, sequence_sum
from hwgrpo.algorithms.surrogates import Metrics, SurrogateInput, clamp_log_ratio, clip_ratio
from hwgrpo.config.schema import LossConfig

GSPO_MAX_LOG_RATIO = 10.0
"""verl's bound on GSPO's log-ratio; a sequence mean reaches it only when training has gone wrong already."""


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
    loss, metrics = clip_ratio(ratio, x.advantage, config)
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
    log_ratio = clamp_log_ratio(x.log_ratio.detach(), config)
    ratio = log_ratio.exp()
    coefficient = ratio.clamp(low, high)
    clipped = (ratio != coefficient).to(ratio.dtype)
    return -coefficient * x.advantage * x.logprob, {"pg_clipfrac": clipped, "ppo_kl": -log_ratio, "ratio": ratio}


@scoped("token")
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
