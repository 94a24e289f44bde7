"""The likely cause of a gap between rollout engine and trainer, from how it developed and which tokens it concerns.

A cause is inferred, not measured: two causes can give one pattern, so `diagnose` gives its evidence and certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

from hwgrpo.config import Config

LAST = 3
"""Latest steps that count as the present gap."""
GROWTH = 20.0
"""Growth of the gap since the first step that is no noise: batches of few tokens differ by less than tenfold."""
STEADY = 3.0
"""Factor within which a gap counts as unchanged after a jump; that of stale weights grows with the square of time."""
RISING = 0.75
"""Share of pairs of steps, of which the later one has the larger gap, from which a gap is rising; by chance 0.5."""
LINE_R2 = 0.45
"""R^2 of the log-ratio over the log-prob from which it is a line. Tiny models at 0.6 to 3 times the temperature have
0.53 to 0.99; in bf16, with stale weights and with damaged ones, less than 0.35, or a slope below LOWEST_SLOPE."""
LEAST_SLOPE = 0.02
"""Least slope of such a line, without its sign."""
LOWEST_SLOPE = -0.9
"""Slopes below are no temperature: policies that have nothing in common have -1, as their log-probs are independent."""
SAME_SLOPE = 1.5
"""Factor within which the slopes of steps agree; another temperature is the same in all steps."""
LARGE = 0.1
"""KL from which rounding is no explanation: bf16 gives about 1e-3, 8-bit weights a few times as much."""


class Gap(NamedTuple):
    """The gap of one step."""

    step: int
    k3_kl: float
    """Its size, `rollout_corr/k3_kl`, nats per token."""
    slope: float
    """`rollout_corr/log_ratio_slope`."""
    r2: float
    """`rollout_corr/log_ratio_r2`."""


@dataclass(frozen=True)
class Cause:
    """A cause that explains a gap."""

    name: str
    certainty: str
    """"likely", "possible", or "unknown" if no known cause has this pattern."""
    evidence: str
    remedy: str
    """What to check or set."""

    @property
    def text(self) -> str:
        """The cause in one sentence, and the remedy."""
        return f"{self.certainty} cause: {self.name} ({self.evidence}); {self.remedy}"


def diagnose(first: Gap, recent: Sequence[Gap], config: Config) -> Cause:
    """Return the cause that the pattern of a gap suggests.

    Args:
        first: the gap of the first measured step of the run.
        recent: the gaps of the latest measured steps, oldest first; at least one.
        config: the run's settings.
    """
    if not all(math.isfinite(value) for gap in (first, *recent[-LAST:]) for value in gap):
        return Cause(
            "log-probs that are not finite",
            "likely",
            "an engine or the trainer reports NaN or infinite log-probs",
            "check the engine's output; set kernels.logits_dtype=float32",
        )
    now = median(gap.k3_kl for gap in recent[-LAST:])
    if now < GROWTH * first.k3_kl:
        return _of_shape(recent, now, config, f"from step {first.step} on")
    jump = _jump(recent, after=first.step + config.rollout.max_staleness)
    if jump is not None:
        return _of_shape(recent, now, config, f"since step {jump.step}, at once", jump)
    return _stale(first, recent, now, config)


def _stale(first: Gap, recent: Sequence[Gap], now: float, config: Config) -> Cause:
    pairs = [earlier.k3_kl < later.k3_kl for earlier, later in combinations(recent, 2)]
    rising = len(pairs) > 0 and sum(pairs) >= RISING * len(pairs)
    bound = config.rollout.max_staleness
    trend = "and is rising with the updates" if rising else "and does not rise further"
    certainty = "likely" if rising or bound else "possible"
    check = f"check that rollout.engine={config.rollout.engine} applies new weights"
    return Cause(
        "stale weights",
        certainty,
        f"rollout_corr/k3_kl was {first.k3_kl:.2g} in step {first.step}, is {now:.2g} now {trend}",
        f"lower rollout.max_staleness (now {bound}) or optim.lr (now {config.optim.lr}), or {check}"
        if bound
        else f"{check}; if it does, lower optim.lr (now {config.optim.lr})",
    )


def _of_shape(recent: Sequence[Gap], now: float, config: Config, when: str, jump: Gap | None = None) -> Cause:
    """Return the cause of a gap that does not grow, by its size and by the tokens that it concerns."""
    temperature, slope = config.rollout.temperature, _slope_of_line(recent[-LAST:])
    r2 = median(gap.r2 for gap in recent[-LAST:])
    if slope is not None:
        return Cause(
            "another sampling temperature",
            "likely",
            f"{when} the log-ratio is proportional to the log-prob: slope {slope:.2g}, R^2 {r2:.2f}, as if the engine "
            f"sampled with a temperature of about {temperature * (1 + slope):.2g}; a scaled LM head looks the same",
            f"check that the engine applies rollout.temperature (now {temperature}), and reports log-probs after it",
        )
    if now < LARGE and jump is None:
        return Cause(
            "lower precision of the engine",
            "possible",
            f"{when} rollout_corr/k3_kl is about {now:.2g} without a trend, and the log-ratio hardly depends on the "
            f"log-prob (R^2 {r2:.2f}); slightly wrong weights look the same",
            f"set rollout.dtype=float32 (now {config.rollout.dtype}), or have engine and trainer use the same kernels",
        )
    return Cause(
        "wrong or damaged weights in the engine",
        "likely" if now >= LARGE else "possible",
        f"{when} rollout_corr/k3_kl is about {now:.2g}, more than rounding explains, and the log-ratio does not depend "
        f"on the log-prob as under another temperature (slope {median(gap.slope for gap in recent[-LAST:]):.2g}, "
        f"R^2 {r2:.2f})",
        f"check the weights that rollout.engine={config.rollout.engine} has: a layer that was not sent, was sent in "
        "another layout, or is of another model; start again, which sends all of them",
    )


def _slope_of_line(gaps: Sequence[Gap]) -> float | None:
    """Return the slope of the log-ratio over the log-prob if it is a line and the same in all steps."""
    slopes = [gap.slope for gap in gaps]
    sizes = [abs(slope) for slope in slopes]
    same = max(sizes) <= SAME_SLOPE * min(sizes) and len({slope > 0 for slope in slopes}) == 1
    is_line = median(gap.r2 for gap in gaps) >= LINE_R2 and min(sizes) >= LEAST_SLOPE and min(slopes) > LOWEST_SLOPE
    return median(slopes) if same and is_line else None


def _jump(gaps: Sequence[Gap], after: int) -> Gap | None:
    """Return the step from which the gap is large and steady, if it came at once, after step `after`."""
    for i in range(1, len(gaps)):
        before, here = gaps[i - 1], gaps[i]
        later = [gap.k3_kl for gap in gaps[i:]]
        if (
            here.step > after + 1
            and here.k3_kl >= GROWTH * before.k3_kl
            and max(later) <= STEADY * here.k3_kl
            and min(later) * STEADY >= here.k3_kl
        ):
            return here
    return None
