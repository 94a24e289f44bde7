"""PPO's clipped policy loss per token, and the building blocks of the others in `surrogate_variants.py`.

Throughout, d = logprob - old_logprob is the log-ratio and rho = e^d the ratio. On policy the old log-prob is the
current one without its gradient: d is 0, rho is 1, and clipping cannot happen, so it is skipped. Metrics that are 0
by definition on policy are then left out.

A further loss is a `Scoped` function of (`SurrogateInput`, `LossConfig`) added to `POLICY_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hwgrpo.algorithms.scope import scoped
from hwgrpo.config.schema import LossConfig

Metrics = dict[str, torch.Tensor]


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


@scoped("token", of_ratio=("clip_low", "clip_high", "dual_clip", "delta", "log_ratio_clamp"))
def ppo_clip(x: SurrogateInput, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), at most -dual_clip A where A < 0.

    Sources: Schulman et al. 2017, equation 7; separate bounds: DAPO (Yu et al. 2025, section 3.1); dual clip: Ye et
    al. 2020, equation 5. The formulas are verl's `vanilla` loss.
    """
    if x.on_policy:
        return -x.advantage * x.log_ratio.exp(), {}
    log_ratio = clamp_log_ratio(x.log_ratio, config)
    ratio = log_ratio.exp()
    loss, metrics = clip_ratio(ratio, x.advantage, config)
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


def clip_ratio(ratio: torch.Tensor, advantage: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, Metrics]:
    """Return PPO's clipped loss and its clip metrics; verl's `pg_clipfrac` is TRL's `clip_ratio/region`.

    `config.delta` also caps the ratio that is not clipped (INTELLECT-2, Prime Intellect 2025), as in TRL: with a
    negative advantage, and with a positive one where it is below 1 + clip_high, whose place it then takes.
    """
    unclipped = -advantage * (ratio if config.delta is None else ratio.clamp(max=config.delta))
    bounded = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = bounded > unclipped
    metrics = {
        "pg_clipfrac": clipped.to(ratio.dtype),
        "clip_ratio/low": (clipped & (advantage < 0)).to(ratio.dtype),
        "clip_ratio/high": (clipped & (advantage > 0)).to(ratio.dtype),
    }
    return torch.maximum(unclipped, bounded), metrics
