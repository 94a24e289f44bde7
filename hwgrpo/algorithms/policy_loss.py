"""The loss of a policy update, per token: policy loss + kl_coef * KL - entropy_coef * entropy, times the weight.

`build_loss(LossSpec(...))` returns the `loss_fn` that `hwgrpo_kernels.linear_token_loss` runs on rows of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hwgrpo.algorithms.correction import CorrectionSpec, correction_weights
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import Scope, Scoped, widest
from hwgrpo.algorithms.surrogates import SurrogateInput
from hwgrpo.catalog import CORRECTIONS, POLICY_LOSSES
from hwgrpo.errors import ConfigError


@dataclass(frozen=True)
class LossSpec:
    """Every number in the loss. The defaults are verl's."""

    policy: str = "ppo_clip"
    """A name in `POLICY_LOSSES`."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low; from 0 (none below 1) to 1 (unbounded)."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: float | None = 3.0
    """`ppo_clip`: the loss of a token with negative advantage is at most this times |A|; None: unbounded."""
    log_ratio_clamp: float | None = 20.0
    """The log-ratio is kept within plus or minus this before exp; None: not at all, as in TRL."""
    tau_pos: float = 1.0
    """`sapo`: temperature of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """`sapo`: temperature of the gate elsewhere."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model; 0 needs no reference."""
    kl_estimator: str = "k3"
    """A name in `KL_ESTIMATORS`."""
    kl_input_clamp: float | None = 20.0
    """`k3`, `k3+`: bound of the log-ratio to the reference; None: none, as in TRL."""
    kl_output_clamp: float | None = 10.0
    """`k3`, `k3+`: bound of the estimate; None: none, as in TRL."""
    kl_times_ratio: bool = False
    """Multiply the KL by the token's ratio, which makes its gradient unbiased (TRL's use_bias_correction_kl)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; negative punishes entropy."""
    correction: CorrectionSpec = field(default_factory=CorrectionSpec)
    """Correction of the gap between rollout engine and trainer, computed from rows["rollout_logprob"]."""

    def __post_init__(self) -> None:
        POLICY_LOSSES.check(self.policy, "policy loss")
        # CISPO's bound may lie below 1: TRL's absolute cap of 0.2 is clip_high=-0.8.
        least_high, bracket = (-1.0, "(-1") if self.policy == "cispo" else (0.0, "[0")
        rules = [
            ("clip_low", self.clip_low, 0 <= self.clip_low <= 1, "in [0, 1]"),
            (
                "clip_high",
                self.clip_high,
                self.clip_high > least_high or self.clip_high == least_high == 0,
                f"in {bracket}, inf)",
            ),
            ("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "greater than 1, or null"),
            ("tau_pos", self.tau_pos, self.tau_pos > 0, "positive"),
            ("tau_neg", self.tau_neg, self.tau_neg > 0, "positive"),
            ("kl_coef", self.kl_coef, 0 <= self.kl_coef < math.inf, "finite and not negative"),
            ("entropy_coef", self.entropy_coef, math.isfinite(self.entropy_coef), "finite"),
        ]
        for key in ("log_ratio_clamp", "kl_input_clamp", "kl_output_clamp"):
            bound = getattr(self, key)
            rules.append((key, bound, bound is None or bound > 0, "positive, or null"))
        for key, value, holds, allowed in rules:
            if not holds:
                raise ConfigError(f"{key}={value!r} in the policy loss: it must be {allowed}")


class TokenStats(Protocol):
    """Per-row statistics that the kernels hand to a loss."""

    @property
    def logprob(self) -> torch.Tensor:
        """[N] fp32 log-probs of the target tokens, with gradient."""
        ...

    @property
    def entropy(self) -> torch.Tensor | None:
        """[N] fp32 entropies, with gradient; None when not computed."""
        ...

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """[S + 1] row bounds of the sequences in these rows; None under scope `token`."""
        ...


class PolicyLoss:
    """The loss as a function of rows; see `build_loss`."""

    def __init__(self, spec: LossSpec) -> None:
        self.spec = spec
        self._surrogate: Scoped = POLICY_LOSSES.load(spec.policy)
        self._kl = build_kl(spec.kl_estimator, input_clamp=spec.kl_input_clamp, output_clamp=spec.kl_output_clamp)
        correction: Scoped = CORRECTIONS.load(spec.correction.name)
        self.scope: Scope = widest(self._surrogate.scope, correction.scope)

    def __call__(
        self, stats: TokenStats, rows: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted loss of each row and its unweighted metrics."""
        spec = self.spec
        old_logprob = rows.get("old_logprob")
        on_policy = old_logprob is None
        old_logprob = stats.logprob.detach() if old_logprob is None else old_logprob
        log_ratio = stats.logprob - old_logprob
        loss, metrics = self._surrogate(
            SurrogateInput(stats.logprob, log_ratio, on_policy, rows["advantage"], stats.cu_seqlens), spec
        )

        correction = rows.get("correction")
        if correction is None and spec.correction.name != "none":
            correction = correction_weights(old_logprob - rows["rollout_logprob"], spec.correction, stats.cu_seqlens)
        if correction is not None:
            loss = loss * correction
        metrics["pg_loss"] = loss.detach()

        ref_logprob = rows.get("ref_logprob")
        assert ref_logprob is not None or spec.kl_coef == 0, "a KL term needs rows['ref_logprob']"
        if ref_logprob is not None:
            kl = self._kl(stats.logprob, ref_logprob)
            metrics["kl"] = kl.detach()
            if spec.kl_coef != 0:
                loss = loss + spec.kl_coef * (kl * log_ratio.exp() if spec.kl_times_ratio else kl)
        if stats.entropy is not None:
            metrics["entropy"] = stats.entropy.detach()
            if spec.entropy_coef != 0:
                loss = loss - spec.entropy_coef * stats.entropy
        assert stats.entropy is not None or spec.entropy_coef == 0, "an entropy bonus needs the entropy statistics"
        return loss * rows["weight"], metrics


def build_loss(spec: LossSpec) -> PolicyLoss:
    """Return the loss function of a policy update.

    The function takes (stats, rows). Rows are [N] tensors: `advantage`; `weight` (from `aggregation.token_weights`);
    optional `old_logprob` (absent: on policy); `ref_logprob` (needed iff `kl_coef` is not 0; else only measured);
    `rollout_logprob` (needed by a correction) or the finished weights as `correction`.

    It returns the loss per row, already multiplied by `weight`, and metrics per row, unweighted and detached:
    `pg_loss` (after correction), `kl`, `entropy`, and off policy as the loss has them `pg_clipfrac` (also TRL's
    clip_ratio/region), `pg_clipfrac_lower` (dual clip), `clip_ratio/low`, `clip_ratio/high`, `ppo_kl`, `ratio`.

    Args:
        spec: the loss.

    Returns:
        A callable with attributes `scope` (`token` | `sequence` | `batch`: which rows it must see at once) and `spec`.

    Raises:
        ConfigError: an unknown policy loss, KL estimator or correction.
    """
    return PolicyLoss(spec)
