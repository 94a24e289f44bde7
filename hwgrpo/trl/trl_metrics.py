"""Metrics of a step and of a validation -> TRL's names, and their means between two logs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from hwgrpo.trl.reward_callables import SCORED

NAMES = {
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "entropy_coef": "actor/entropy_coef",
    "policy_loss": "actor/pg_loss",
    "aux_loss": "actor/router_loss",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    **{name: name for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")},
    "cispo_clip_ratio": "cispo_clip_ratio",
    **{name: name for name in ("tools/call_frequency", "tools/failure_frequency")},
    "step_time": "timing_s/step",
}
"""TRL's name -> the metric of a step here."""
_CLIPS = {
    **dict.fromkeys(("ppo_clip", "gspo"), tuple(name for name in NAMES if name.startswith("clip_ratio/"))),
    "cispo": ("cispo_clip_ratio",),
}
"""Loss -> the clip ratios that TRL logs of it."""
_LAST = ("learning_rate", "num_tokens")
"""Metrics of which a log has the last value, not the mean."""
_FUNCTION = re.compile(r"rewards/(.+)/(mean|std)")
_VALIDATION_FUNCTION = re.compile(r"val-aux/(.+)/rewards/([^/]+)/mean")
_VALIDATION = re.compile(r"val-core/(.+)/reward/(greedy|mean@\d+|best@\d+)")


def named(metrics: Mapping[str, float], models: Mapping[str, str], loss: str) -> dict[str, float]:
    """Return the metrics of a step under TRL's names.

    Args:
        metrics: those here.
        models: name of a reward model here -> its name in TRL.
        loss: algorithm.loss.name; where it clips, an update on policy has clip ratios of 0.
    """
    if NAMES["policy_loss"] in metrics:
        metrics = dict.fromkeys(_CLIPS.get(loss, ()), 0.0) | dict(metrics)
    values = {name: metrics[here] for name, here in NAMES.items() if here in metrics}
    for name, value in metrics.items():
        match = _FUNCTION.fullmatch(name)
        if match is not None and match[1] != SCORED:
            values[f"rewards/{models.get(match[1], match[1])}/{match[2]}"] = value
    return values


def named_validation(metrics: Mapping[str, float], models: Mapping[str, str], *, by_name: bool) -> dict[str, float]:
    """Return the metrics of a validation under TRL's names, as means over the sources.

    Args:
        metrics: those here.
        models: name of a reward model here -> its name in TRL.
        by_name: whether those of a single source have its name, too, as those of several.
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if (match := _VALIDATION.fullmatch(name)) is not None:
            kind = {"greedy": "reward_greedy", "mean": "reward", "best": "reward_best"}[match[2].partition("@")[0]]
            found.setdefault(kind, {})[match[1]] = value
        elif (match := _VALIDATION_FUNCTION.fullmatch(name)) is not None and match[2] != SCORED:
            found.setdefault(f"rewards/{models.get(match[2], match[2])}/mean", {})[match[1]] = value
    if "reward" not in found and "reward_greedy" in found:  # no samples
        found["reward"] = found["reward_greedy"]
    result = {f"eval_{kind}": sum(values.values()) / len(values) for kind, values in found.items()}
    for kind, values in found.items():
        if by_name or len(values) > 1:
            result |= {f"eval_{source}_{kind}": value for source, value in values.items()}
    if "timing_s/testing" in metrics:
        result["eval_runtime"] = metrics["timing_s/testing"]
    return result


class LogWindow:
    """Means of metrics since the last log."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; those that are not a number are left out."""
        for name, value in metrics.items():
            if not math.isnan(value):
                self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the means, and begin anew."""
        values, self._values = self._values, {}
        return {name: listed[-1] if name in _LAST else sum(listed) / len(listed) for name, listed in values.items()}
