"""Policy losses that keep the entropy up by treating tokens of high covariance apart: KL-Cov and Clip-Cov.

Which tokens these are is decided over the whole update before it (`token_selection.py`); `x.selected` marks them.
Notation and the treatment of on-policy rows are those of `surrogates.py`.
"""

from __future__ import annotations

from typing import Annotated

import torch

from hwgrpo.algorithms.scope import scoped
from hwgrpo.algorithms.surrogates import Metrics, SurrogateInput, clip_ratio
from hwgrpo.algorithms.token_selection import largest_covariances, some_covariances
from hwgrpo.config.bound_arguments import Below
from hwgrpo.config.fields import Limits
from hwgrpo.config.schema import LossConfig


@scoped("token", selects=largest_covariances, of_ratio=("share", "coef"))
def kl_cov(
    x: SurrogateInput,
    config: LossConfig,
    *,
    share: Annotated[float, Limits(above=0, at_most=1)] = 2e-4,
    coef: Annotated[float, Limits(at_least=0)] = 0.1,
) -> tuple[torch.Tensor, Metrics]:
    """-A rho, and coef |d| more for the `share` of tokens with the largest covariance; nothing is clipped.

    Source: KL-Cov (Cui et al. 2025), as in verl.
    """
    assert x.selected is not None, "kl_cov needs the tokens that were selected"
    ratio = x.log_ratio.exp()
    loss = -x.advantage * ratio + coef * x.selected * x.log_ratio.abs()
    metrics = {"selected_tokens": x.selected}
    return loss, metrics if x.on_policy else metrics | {"ppo_kl": -x.log_ratio.detach(), "ratio": ratio.detach()}


@scoped("token", selects=some_covariances, of_ratio=("clip_low", "clip_high"))
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
