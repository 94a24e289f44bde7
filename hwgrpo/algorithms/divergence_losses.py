"""Policy losses that bound how far a token's probability moves, per token: DPPO by total variation or KL, DRO.

Notation and the treatment of on-policy rows are those of `surrogates.py`. The probability of a token stands beside
that of all others: the two form a binary distribution.
"""

from __future__ import annotations

from typing import Annotated

import torch

from hwgrpo.algorithms.scope import scoped
from hwgrpo.algorithms.surrogates import Metrics, SurrogateInput, clamp_log_ratio
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import LossConfig

SMALL = 1e-8
"""Added to probabilities before their logarithm, as verl does."""


@scoped("token", of_ratio=("clip_low", "clip_high", "log_ratio_clamp", "cap"))
def dppo_tv(
    x: SurrogateInput, config: LossConfig, *, cap: Annotated[float, Limits(above=0)] = 20.0
) -> tuple[torch.Tensor, Metrics]:
    """-A sg(min(rho, cap)) logprob where the probability has moved by at most clip_high (A > 0) or clip_low, else 0.

    Only moves in the advantage's direction count: up by more than clip_high where A > 0, down by more than clip_low
    where not. Source: DPPO (arXiv 2602.04879), binary total variation, as in verl.
    """
    if x.on_policy:
        return -x.advantage * x.logprob, {}
    moved = x.logprob.detach().exp() - (x.logprob - x.log_ratio).detach().exp()
    kept = torch.where(x.advantage > 0, moved <= config.clip_high, moved >= -config.clip_low)
    return _kept_only(x, config, kept, cap)


@scoped("token", of_ratio=("clip_low", "clip_high", "log_ratio_clamp", "cap"))
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


@scoped("token", penalizes=True, of_ratio=("beta",))
def dro(
    x: SurrogateInput, config: LossConfig, *, beta: Annotated[float, Limits(at_least=0)] = 0.1
) -> tuple[torch.Tensor, Metrics]:
    """-A logprob + beta/2 d^2: a quadratic penalty takes the place of the clip.

    Source: DRO (Richemond et al. 2024), as in verl, whose `dro_beta` has no default.
    """
    loss = -x.advantage * x.logprob + 0.5 * beta * x.log_ratio.square()
    return loss, {} if x.on_policy else {"ppo_kl": -x.log_ratio.detach()}
