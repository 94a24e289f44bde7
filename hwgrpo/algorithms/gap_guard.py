"""The guard of the gap between rollout engine and trainer: thresholds, measures, when to apply which, likely causes.

`advance` is the state machine: from a state and the metrics of a step to the next state. A level is a number of
measures: at level 2 the first two of `measures` are applied. A level is raised when a metric was beyond a threshold of
the next measure for RAISE_AFTER steps in a row, and lowered when all were within half of the last one's for longer.

`diagnose` names a cause from how the gap developed and which tokens it concerns. A cause is inferred, not measured: two
causes can give one pattern, so it comes with its evidence and certainty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any, Literal, NamedTuple

from hwgrpo.config.schema import CorrectionConfig, OptimConfig, RolloutConfig

RAISE_AFTER = 3
"""Measured steps in a row beyond a threshold before the next measure: one odd batch is no sign."""
LOWER_AFTER = 10
"""Measured steps in a row within LOWER_SHARE of the thresholds before a measure is withdrawn; doubled each time that it
had to be applied again, so that a measure that cures the gap is not withdrawn and applied forever."""
LOWER_SHARE = 0.5
MOST_DOUBLINGS = 6
HISTORY = 20
"""Latest steps kept for `diagnose`."""
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

Severity = Literal["weigh", "reject", "stop"]


@dataclass(frozen=True)
class Threshold:
    """How far a metric may be from its value for equal policies before each kind of measure is due."""

    metric: str
    equal: float
    """Its value if engine and trainer have the same policy."""
    weigh: float
    """Distance from which importance weights are due."""
    reject: float | None
    """Distance from which tokens are rejected, and fresher weights are due; None: never for this metric."""
    stop: float | None
    """Distance from which no measure helps."""
    reason: str


THRESHOLDS = (
    Threshold(
        "rollout_corr/kl",
        0.0,
        0.03,
        0.2,
        0.5,
        "engines in bf16 have about 1e-3 (Liu et al. 2025, When Speed Kills Stability; NeMo RL's documentation); "
        "verl's documentation warns above 0.1, which tiny models reach that learn fast from samples 4 versions old; "
        "at 0.5 most weights of tokens are far from 1",
    ),
    Threshold(
        "training/rollout_probs_diff_mean",
        0.0,
        0.1,
        0.2,
        0.4,
        "vendors' documents accept up to 0.01; it goes with the root of the KL, and no single token can decide it",
    ),
    Threshold(
        "rollout_corr/chi2_token",
        0.0,
        1.0,
        None,
        None,
        "verl's documentation calls more than 1 a severe shift; a few tokens suffice, which truncation bounds",
    ),
    Threshold(
        "rollout_corr/rollout_is_eff_sample_size",
        1.0,
        0.5,
        0.7,
        None,
        "verl's documentation calls 0.5 good and warns below 0.3; a few tokens suffice for that, which masks drop",
    ),
    Threshold(
        "rollout_corr/log_ratio_max",
        0.0,
        math.log(1e4),
        None,
        None,
        "verl and slime veto a token whose ratio is below 1e-4; importance weights bound what it contributes",
    ),
)
"""The metrics that the guard watches; `rollout_corr/*` and `training/*` cover all ranks, so that ranks agree."""


@dataclass(frozen=True)
class Measure:
    """A measure against the gap; later ones replace what earlier ones set."""

    severity: Severity
    """Which thresholds it answers."""
    correction: CorrectionConfig | None = None
    """Applied instead of the configured one."""
    max_staleness: int | None = None
    """Bound applied instead of the configured one."""

    @property
    def settings(self) -> str:
        """The settings that have the same effect; empty for the end of the run."""
        if self.max_staleness is not None:
            return f"rollout.max_staleness={self.max_staleness}"
        return "" if self.correction is None else correction_settings(self.correction)


def correction_settings(correction: CorrectionConfig) -> str:
    """Return a correction as settings, `key=value` with commas."""
    bounds = {"low": correction.low, "high": correction.high}
    values = {"name": correction.name} | {name: bound for name, bound in bounds.items() if bound is not None}
    if correction.name == "none":
        values = {"name": "none"}
    return ", ".join(f"algorithm.correction.{name}={value}" for name, value in values.items())


MASK_OF = {"none": "token_mask", "token_truncate": "token_mask", "sequence_truncate": "sequence_mask"}
"""The mask with the ratio of each correction that does not reject anything."""
TRUNCATION = CorrectionConfig(name="token_truncate", low=None, high=2.0)
"""TIS with verl's bound."""
MASK_BOUNDS = (0.5, 5.0)
"""IcePop's bounds; those of a configured correction stay."""


def measures(correction: CorrectionConfig, max_staleness: int) -> tuple[Measure, ...]:
    """Return the measures of a run, in the order in which they are applied; the last ends it.

    A configured correction is never weakened: only its mask replaces a truncation, and nothing a mask or a function of
    the user's own.

    Args:
        correction: the configured correction.
        max_staleness: the configured bound if the source of responses can lower it, else 0.
    """
    steps: list[Measure] = []
    if correction.name == "none":
        steps.append(Measure("weigh", correction=replace(TRUNCATION, reject=correction.reject)))
    if correction.name in MASK_OF:
        low, high = MASK_BOUNDS if correction.name == "none" else (correction.low, correction.high)
        masked = replace(correction, name=MASK_OF[correction.name], low=low, high=high)
        steps.append(Measure("reject", correction=masked))
    while max_staleness > 0:
        max_staleness //= 2
        steps.append(Measure("reject", max_staleness=max_staleness))
    return (*steps, Measure("stop"))


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
class GuardState:
    """The guard's memory, a small JSON value in each checkpoint."""

    level: int = 0
    """Number of applied measures."""
    above: int = 0
    """Steps in a row beyond a threshold of the next measure."""
    below: int = 0
    """Steps in a row well within the thresholds of the last applied one."""
    changed: int = 0
    """Step of the last change of level."""
    before: int = 0
    """Level before it."""
    relapses: int = 0
    """Times that a level was raised right after it had been lowered."""
    stated: int = 0
    """Highest level that was stated to the user."""
    first: Gap | None = None
    """Gap of the first measured step."""
    recent: tuple[Gap, ...] = ()
    """Gaps of the latest measured steps, oldest first."""

    @property
    def calm_steps(self) -> int:
        """Steps in a row well within the thresholds after which the level is lowered."""
        return LOWER_AFTER * 2 ** min(self.relapses, MOST_DOUBLINGS)

    def record(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self) | {"first": self.first and [*self.first], "recent": [[*gap] for gap in self.recent]}

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> GuardState:
        """Return the state of `record`."""
        first = record["first"]
        return cls(**{**record, "first": first and Gap(*first), "recent": tuple(Gap(*gap) for gap in record["recent"])})


def advance(state: GuardState, steps: Sequence[Measure], step: int, metrics: Mapping[str, float]) -> GuardState:
    """Return the state after a step; its level differs by one if a measure is to be applied or withdrawn.

    Args:
        state: the state before.
        steps: the run's measures, from `measures`.
        step: step number.
        metrics: the step's metrics, over all ranks. Without a trained token there are none of the gap: no news.
    """
    if "rollout_corr/k3_kl" not in metrics:
        return state
    gap = Gap(step, *(metrics[f"rollout_corr/{name}"] for name in ("k3_kl", "log_ratio_slope", "log_ratio_r2")))
    state = replace(state, first=state.first or gap, recent=(*state.recent, gap)[-HISTORY:])
    is_bad = state.level < len(steps) and bool(signs(metrics, steps[state.level].severity))
    is_calm = state.level > 0 and not signs(metrics, steps[state.level - 1].severity, LOWER_SHARE)
    state = replace(state, above=state.above + 1 if is_bad else 0, below=state.below + 1 if is_calm else 0)
    if state.above >= RAISE_AFTER:
        relapsed = state.before > state.level
        return _moved(replace(state, relapses=state.relapses + relapsed), step, state.level + 1)
    if state.below >= state.calm_steps:
        return _moved(state, step, state.level - 1)
    return state


def _moved(state: GuardState, step: int, level: int) -> GuardState:
    return replace(state, level=level, above=0, below=0, changed=step, before=state.level)


def signs(metrics: Mapping[str, float], severity: Severity, share: float = 1.0) -> list[str]:
    """Return a text for each metric beyond its threshold; NaN counts as beyond.

    Args:
        metrics: of a step.
        severity: which thresholds.
        share: factor of the thresholds.
    """
    found = []
    for each in THRESHOLDS:
        limit: float | None = getattr(each, severity)
        if limit is None or each.metric not in metrics:
            continue
        value = metrics[each.metric]
        if not abs(value - each.equal) <= limit * share:
            found.append(f"{each.metric} {value:.3g} (limit {abs(each.equal - limit):.3g})")
    return found


def in_force(steps: Sequence[Measure], level: int) -> tuple[CorrectionConfig | None, int | None]:
    """Return correction and bound of staleness at a level; None where the configured one applies."""
    applied = steps[:level]
    corrections = [measure.correction for measure in applied if measure.correction is not None]
    bounds = [measure.max_staleness for measure in applied if measure.max_staleness is not None]
    return (corrections or [None])[-1], (bounds or [None])[-1]


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


def diagnose(first: Gap, recent: Sequence[Gap], rollout: RolloutConfig, optim: OptimConfig) -> Cause:
    """Return the cause that the pattern of a gap suggests.

    Args:
        first: the gap of the first measured step of the run.
        recent: the gaps of the latest measured steps, oldest first; at least one.
        rollout: settings of the engine, which the remedies name.
        optim: settings of the optimizer, likewise.
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
        return _of_shape(recent, now, rollout, f"from step {first.step} on")
    jump = _jump(recent, after=first.step + rollout.max_staleness)
    if jump is not None:
        return _of_shape(recent, now, rollout, f"since step {jump.step}, at once", jump)
    return _stale(first, recent, now, rollout, optim)


def _stale(first: Gap, recent: Sequence[Gap], now: float, rollout: RolloutConfig, optim: OptimConfig) -> Cause:
    pairs = [earlier.k3_kl < later.k3_kl for earlier, later in combinations(recent, 2)]
    rising = len(pairs) > 0 and sum(pairs) >= RISING * len(pairs)
    bound = rollout.max_staleness
    trend = "and is rising with the updates" if rising else "and does not rise further"
    certainty = "likely" if rising or bound else "possible"
    check = f"check that rollout.engine={rollout.engine} applies new weights"
    return Cause(
        "stale weights",
        certainty,
        f"rollout_corr/k3_kl was {first.k3_kl:.2g} in step {first.step}, is {now:.2g} now {trend}",
        f"lower rollout.max_staleness (now {bound}) or optim.lr (now {optim.lr}), or {check}"
        if bound
        else f"{check}; if it does, lower optim.lr (now {optim.lr})",
    )


def _of_shape(recent: Sequence[Gap], now: float, rollout: RolloutConfig, when: str, jump: Gap | None = None) -> Cause:
    """Return the cause of a gap that does not grow, by its size and by the tokens that it concerns."""
    temperature, slope = rollout.temperature, _slope_of_line(recent[-LAST:])
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
            f"set rollout.dtype=float32 (now {rollout.dtype}), or have engine and trainer use the same kernels",
        )
    return Cause(
        "wrong or damaged weights in the engine",
        "likely" if now >= LARGE else "possible",
        f"{when} rollout_corr/k3_kl is about {now:.2g}, more than rounding explains, and the log-ratio does not depend "
        f"on the log-prob as under another temperature (slope {median(gap.slope for gap in recent[-LAST:]):.2g}, "
        f"R^2 {r2:.2f})",
        f"check the weights that rollout.engine={rollout.engine} has: a layer that was not sent, was sent in "
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
