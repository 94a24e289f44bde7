"""Coefficients of the KL and of the entropy bonus: fixed, or adapted to a target from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hwgrpo.config.schema import LARGEST_ERROR, AlgorithmConfig, KlConfig


def adapt_kl(coef: float, kl: float, responses: float, config: KlConfig) -> float:
    """Return the KL coefficient after a step: larger if the KL was above `target`, smaller if below.

    Source: Ziegler et al. 2019 (Fine-Tuning Language Models from Human Preferences), as verl's AdaptiveKLController.

    Args:
        coef: the coefficient of the step.
        kl: its KL to the reference, nats per token; without effect where it is not finite.
        responses: its number of responses.
        config: `target` None keeps the coefficient; `horizon` is above 0.2 times the responses of a step, so that it
            stays above 0.
    """
    if config.target is None or not math.isfinite(kl):
        return coef
    error = min(max(kl / config.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * responses / config.horizon)


def adapt_entropy(coef: float, entropy: float, algorithm: AlgorithmConfig) -> float:
    """Return the entropy coefficient after an update: a step up if the entropy was up to the target, else down.

    Source: Skywork-OR1 (He et al. 2025), as TRL's use_adaptive_entropy.

    Args:
        coef: the coefficient before.
        entropy: mean entropy of the update, nats per token; without effect where it is not finite.
        algorithm: `entropy_target` None keeps the coefficient.
    """
    if algorithm.entropy_target is None or not math.isfinite(entropy):
        return coef
    if entropy <= algorithm.entropy_target:
        return min(coef + algorithm.entropy_coef_delta, algorithm.entropy_coef_max)
    return max(coef - algorithm.entropy_coef_delta, algorithm.entropy_coef_min)


@dataclass
class Coefficients:
    """The present coefficients of a run, the same on all ranks."""

    algorithm: AlgorithmConfig
    kl: float
    """Coefficient of the KL, in the loss or in the reward."""
    entropy: float
    """Coefficient of the entropy bonus, without the condition that `entropy_bonus` has."""
    last_entropy: float | None = None
    """Mean entropy of the last update; None before the first one."""

    @property
    def kl_loss(self) -> float:
        """Coefficient of the KL in the loss."""
        return 0.0 if self.algorithm.kl.in_reward else self.kl

    @property
    def entropy_bonus(self) -> float:
        """Coefficient of the entropy in the loss: 0 while the entropy is above a target."""
        target = self.algorithm.entropy_target
        above = target is not None and (self.last_entropy is None or self.last_entropy > target)
        return 0.0 if above else self.entropy

    def follow_kl(self, kl: float, responses: float) -> None:
        """Adapt the KL's coefficient to the KL of a step with so many responses over all ranks."""
        self.kl = adapt_kl(self.kl, kl, responses, self.algorithm.kl)

    def after_step(self, metrics: Mapping[str, float], responses: float) -> dict[str, float]:
        """Adapt the coefficient of a KL in the loss to a finished step; return the metrics of adapted coefficients."""
        found = {}
        if self.algorithm.entropy_target is not None:
            found["actor/entropy_coef"] = self.entropy
        if self.algorithm.kl.target is not None and not self.algorithm.kl.in_reward:
            found["actor/kl_coef"] = self.kl
            self.follow_kl(metrics.get("actor/kl_loss", math.nan), responses)
        return found

    def after_update(self, entropy: float) -> None:
        """Adapt the entropy's coefficient to a finished update."""
        self.entropy = adapt_entropy(self.entropy, entropy, self.algorithm)
        if math.isfinite(entropy):
            self.last_entropy = entropy

    def state(self) -> dict[str, float | None]:
        """Return what a resumed run restores, as JSON values; empty where both are fixed."""
        kl = {} if self.algorithm.kl.target is None else {"kl": self.kl}
        if self.algorithm.entropy_target is None:
            return {**kl}
        return {**kl, "entropy": self.entropy, "last_entropy": self.last_entropy}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Restore what `state` returned, as far as the settings still adapt it."""
        for name, value in state.items():
            if name in self.state():
                setattr(self, name, value)


def initial_coefficients(algorithm: AlgorithmConfig) -> Coefficients:
    """Return the coefficients of the first step."""
    return Coefficients(algorithm, algorithm.kl.coef, algorithm.entropy_coef)
