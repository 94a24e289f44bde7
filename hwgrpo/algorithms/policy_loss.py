"""The loss of a policy update, per token: policy loss + kl.coef * KL - entropy_coef * entropy, times the weight.

`build_loss(config.algorithm)` returns the `loss_fn` that `hwgrpo_kernels.linear_token_loss` runs on rows of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from hwgrpo.algorithms.coefficients import Coefficients, initial_coefficients
from hwgrpo.algorithms.correction import load_correction, normalized_weights, on_policy_enough
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.losses import SurrogateInput
from hwgrpo.algorithms.scope import Scope, Scoped, load_scoped, widest
from hwgrpo.algorithms.token_selection import MASKS, selections_of
from hwgrpo.catalog import EXACT_KL, POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig, LossConfig
from hwgrpo.config.uses import default_of
from hwgrpo.errors import ConfigError, choice_error, shown
from hwgrpo.values import EXTRA


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
    def full_kl(self) -> torch.Tensor | None:
        """[N] fp32 KLs from the reference over the full vocabulary, with gradient; None without a reference."""
        ...

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """[S + 1] row bounds of the sequences in these rows; None under scope `token`."""
        ...


OWN_METRICS = (
    *("loss", "pg_loss", "kl", "entropy", "tokens", "trained", "router_loss", "off_policy_masked"),
    *MASKS.values(),
)
"""Names of sums over rows that are not the policy loss's."""


class PolicyLoss:
    """The loss as a function of rows; see `build_loss`."""

    def __init__(
        self, algorithm: AlgorithmConfig, coefficients: Coefficients | None = None, scope: Scope = "token"
    ) -> None:
        self.algorithm = algorithm
        self.coefficients = coefficients or initial_coefficients(algorithm)
        loss = algorithm.loss
        self._surrogate: Scoped = load_scoped(POLICY_LOSSES, loss.name, loss.kwargs, 2, "algorithm.loss")
        if self._surrogate.reads is not None:
            check_read(loss, self._surrogate.reads)
        self._kl = build_kl(algorithm.kl)
        per_sequence = self._surrogate.weighs_sequences
        self._correction = load_correction(algorithm.correction, per_sequence)
        masks = "token" if algorithm.off_policy_threshold is None else "sequence"
        self.scope: Scope = widest(scope, self._surrogate.scope, self._correction.scope, masks)
        self.selections = selections_of(algorithm, self._surrogate)
        if algorithm.correction.normalize:
            self.selections["correction"] = partial(
                normalized_weights, config=algorithm.correction, weighs_sequences=per_sequence
            )
        """Name of a row -> what selects its tokens among all of an update; see `token_selection`."""
        self.penalizes = self._surrogate.penalizes
        """Whether responses with an advantage of 0 have a gradient, besides that of KL and entropy."""
        self._corrects = algorithm.correction.name != "none" or bool(algorithm.correction.reject)
        interpolates = algorithm.old_logprobs == "interpolated"
        self.needs_rollout = self._corrects or interpolates or algorithm.off_policy_threshold is not None
        """Whether rows need the rollout engine's log-probs."""

    def __call__(
        self, stats: TokenStats, rows: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted loss of each row and its unweighted metrics."""
        correction_config, kl_config = self.algorithm.correction, self.algorithm.kl
        kl_coef, entropy_coef = self.coefficients.kl_loss, self.coefficients.entropy_bonus
        old_logprob = rows.get("old_logprob")
        on_policy = old_logprob is None
        old_logprob = stats.logprob.detach() if old_logprob is None else old_logprob
        if (rollout_share := rows.get("rollout_share")) is not None:
            on_policy, old_logprob = False, stats.logprob.detach().lerp(rows["rollout_logprob"], rollout_share)
        log_ratio = stats.logprob - old_logprob
        loss, metrics = self._surrogate(
            SurrogateInput(
                logprob=stats.logprob,
                log_ratio=log_ratio,
                on_policy=on_policy,
                advantage=rows["advantage"],
                cu_seqlens=stats.cu_seqlens,
                selected=rows.get("selected"),
                extras={name.removeprefix(EXTRA): rows[name] for name in rows if name.startswith(EXTRA)},
            ),
            self.algorithm.loss,
        )
        if reserved := sorted(metrics.keys() & set(OWN_METRICS)):
            raise ConfigError(
                f"algorithm.loss.name={self.algorithm.loss.name!r} returns the metric {reserved[0]!r}, "
                "which is one of hwgrpo's own; rename it"
            )

        correction = rows.get("correction")
        if correction is None and self._corrects:
            with torch.no_grad():
                log_gap = old_logprob - rows["rollout_logprob"]
                correction = self._correction(log_gap, correction_config, stats.cu_seqlens)
        if correction is not None:
            loss = loss * correction
        if self.algorithm.off_policy_threshold is not None:
            stale = (rows["rollout_logprob"] - stats.logprob).detach()
            kept = on_policy_enough(stale, rows["advantage"], self.algorithm.off_policy_threshold, stats.cu_seqlens)
            loss, metrics["off_policy_masked"] = loss * kept, 1 - kept
        for name in MASKS.keys() & rows.keys():
            loss, metrics[MASKS[name]] = loss * rows[name], rows[name]
        metrics["pg_loss"] = loss.detach()

        known = (stats.full_kl,) if kl_config.estimator == EXACT_KL else (stats.logprob, rows.get("ref_logprob"))
        assert known[-1] is not None or kl_coef == 0, "a KL term needs rows['ref_logprob'], or `full_kl`"
        if known[-1] is not None:
            kl = self._kl(*known)
            metrics["kl"] = kl.detach()
            if kl_coef != 0:
                loss = loss + kl_coef * (kl * log_ratio.exp() if kl_config.times_ratio else kl)
        if stats.entropy is not None:
            metrics["entropy"] = stats.entropy.detach()
            if entropy_coef != 0:
                bonus = rows.get("bonus")
                loss = loss - entropy_coef * (stats.entropy if bonus is None else stats.entropy * bonus)
        assert stats.entropy is not None or entropy_coef == 0, "an entropy bonus needs the entropy statistics"
        return loss * rows["weight"], metrics


def check_read(loss: LossConfig, reads: tuple[str, ...]) -> None:
    """Check that the settings of a loss are read by a function of the user's own that declares what it reads.

    The schema checks those of built-in losses, before torch is imported.

    Args:
        loss: the settings.
        reads: what the function declares.

    Raises:
        ConfigError: the first setting with another value than its default that it does not read, or there is no
            setting of a declared name.
    """
    settings = {field.name: field for field in dataclasses.fields(loss) if field.name not in ("name", "kwargs")}
    for name in reads:
        if name not in settings:
            raise choice_error(f"algorithm.loss.name={loss.name!r}: reads", name, settings)
    for name, field in settings.items():
        value, default = getattr(loss, name), default_of(field)
        if name not in reads and value != default:
            raise ConfigError(
                f"algorithm.loss.{name}={shown(value)} has no effect with algorithm.loss.name={loss.name!r}, whose "
                f"decorator declares reads={reads}; add {name!r} there if the function reads it, set "
                f"algorithm.loss.name={' or '.join(POLICY_LOSSES.readers(name))}, or leave algorithm.loss.{name} at "
                f"its default {shown(default)}"
            )


def build_loss(
    algorithm: AlgorithmConfig, coefficients: Coefficients | None = None, scope: Scope = "token"
) -> PolicyLoss:
    """Return the loss function of a policy update.

    The function takes (stats, rows). Rows are [N] tensors: `advantage`; `weight` (from `aggregation.token_weights`);
    optional `old_logprob` (absent: on policy); `ref_logprob` (needed iff the loss estimates a KL; else only measured);
    `rollout_logprob` (needed by a correction) or the finished weights as `correction`.

    It returns the loss per row, already multiplied by `weight`, and metrics per row, unweighted and detached:
    `pg_loss` (after correction), `kl`, `entropy`, and off policy as the loss has them `pg_clipfrac` (also TRL's
    clip_ratio/region), `pg_clipfrac_lower` (dual clip), `clip_ratio/low`, `clip_ratio/high`, `clip_ratio/capped`
    (cispo), `ppo_kl`, `ratio`.

    Args:
        algorithm: the section `algorithm` of checked settings; without arguments `AlgorithmConfig()` has the defaults.
        coefficients: those of KL and entropy, read in each call; None: fixed ones from the settings.
        scope: rows that it shall see at once even if it needs fewer.

    Returns:
        A callable with the attribute `scope`: `token`, `sequence` or `batch`, which rows it must see at once.

    Raises:
        ConfigError: an unknown policy loss, KL estimator or correction, or a setting that the user's loss
            does not read.
    """
    return PolicyLoss(algorithm, coefficients, scope)
