"""Where the curves of two runs part, by which stage of the step, and what explains it.

Two questions per metric: the first step at which its values are not equal to the bit, and, for means over samples, the
first step from which the curves differ by more than noise (`curve_noise.py`). Runs with the same settings, versions,
machine and data on a CPU should be equal to the bit: between them any difference is one, and noise is not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hwgrpo.errors import ConfigError
from hwgrpo.report.compared_metrics import GAP, SCHEDULED, STAGES, VALIDATION, placed
from hwgrpo.report.curve_noise import FEWEST, compare_curves, estimate_noise
from hwgrpo.report.loaded_run import SAMPLES, LoadedRun
from hwgrpo.report.run_data import RunRecord
from hwgrpo.report.run_differences import (
    Difference,
    OneSidedWarning,
    differences,
    one_sided_warnings,
    reasons_against_equality,
)

Verdict = Literal["identical", "within_noise", "parts"]
Metrics = Mapping[int, Mapping[str, float]]

LOGGED = "logged completions"
_NAMES = [stage.name for stage in STAGES]


@dataclass(frozen=True)
class MetricComparison:
    """One metric of two runs, or one stage of the completions that both logged."""

    name: str
    stage: str
    is_main: bool
    """Whether its curves are compared with noise."""
    compared: int
    """Steps with a value in both runs."""
    step: int | None = None
    """First step that is not equal to the bit; None: all are equal."""
    a: float | str | None = None
    """Value of A there; None: it has none."""
    b: float | str | None = None
    parts: int | None = None
    """First step from which the curves differ by more than noise."""
    parts_a: float | None = None
    """Value of A there."""
    parts_b: float | None = None
    errors: float | None = None
    """Largest gap of the curves, in its standard errors; None: not judged."""
    limit: float | None = None
    """Standard errors from which a gap counts."""
    smallest: float | None = None
    """Smallest lasting gap that would count; None: not judged."""


@dataclass(frozen=True)
class RunComparison:
    """A compared with B."""

    steps: tuple[int, ...]
    """Steps that both runs have; 0: the validation before training."""
    completions: int
    """Logged completions that were compared."""
    metrics: tuple[MetricComparison, ...]
    """In the order of the step's stages."""
    only_a: tuple[str, ...]
    """Metrics that A alone logged."""
    only_b: tuple[str, ...]
    reasons: tuple[str, ...]
    """Why the runs need not be equal to the bit; none: any difference is one."""
    differences: tuple[Difference, ...]
    warnings: tuple[OneSidedWarning, ...]
    gap_step: int | None
    """Step of the gap metrics: the last one before the runs part, else the first; None: neither has any."""
    gap: tuple[tuple[str, float | None, float | None], ...]
    """(metric, A, B) of the gap between the log-probs of engine and trainer at that step."""
    verdict: Verdict
    headline: str
    equal_until: int | None
    """Last step up to which all is equal to the bit; None: not even the first is."""
    parts_from: int | None
    parts_in: str | None
    """The metric, or the stage of the logged completions."""
    notes: tuple[str, ...] = field(default=())


def compare(a: LoadedRun, b: LoadedRun) -> RunComparison:
    """Compare two runs.

    Raises:
        ConfigError: a run has no metrics, or they share no step or no metric.
    """
    first, second = a.record, b.record
    for record in (first, second):
        if not record.metrics:
            raise ConfigError(f"{record.folder} has {record.problems[-1]}; compare runs that logged steps")
    steps = sorted(first.metrics.keys() & second.metrics.keys())
    if not steps:
        raise ConfigError(
            f"{first.folder} ({_span(first)}) and {second.folder} ({_span(second)}) share no step; compare runs whose "
            "steps overlap"
        )
    rows = _exact_rows(a, b, steps)
    if not any(row.compared for row in rows):
        raise ConfigError(f"{first.folder} and {second.folder} share no metric; compare runs of one command")
    found = differences(first, second)
    reasons = reasons_against_equality(first, second, found)
    # without another setting or start, what settings decide is a result, too
    results = [row for row in rows if not reasons or row.name not in SCHEDULED]
    start = min((row.step for row in results if row.step is not None), default=None)
    if start is not None:
        count = sum(row.is_main for row in rows)
        rows = [_with_noise(row, first.metrics, second.metrics, start, count) for row in rows]
        results = [row for row in rows if not reasons or row.name not in SCHEDULED]
    verdict, headline, parted = _judge(results, reasons, steps, start)
    parts_from = None if parted is None else parted.step if verdict == "parts" and not reasons else parted.parts
    if parted is not None and parts_from is None:
        parts_from = parted.step
    gap_step, gap = _gap(first.metrics, second.metrics, steps, parts_from if parts_from is not None else start)
    names = [
        {name for values in record.metrics.values() for name in values if placed(name)} for record in (first, second)
    ]
    one_sided = len(names[0] ^ names[1])
    if verdict == "identical" and one_sided:
        headline += f"; not compared: {one_sided} {'metric' if one_sided == 1 else 'metrics'} of one run alone"
    return RunComparison(
        steps=tuple(steps),
        completions=_compared_samples(a, b, steps),
        metrics=tuple(rows),
        only_a=tuple(sorted(names[0] - names[1])),
        only_b=tuple(sorted(names[1] - names[0])),
        reasons=tuple(reasons),
        differences=tuple(found),
        warnings=tuple(one_sided_warnings(first, second)),
        gap_step=gap_step,
        gap=gap,
        verdict=verdict,
        headline=headline,
        equal_until=_before(steps, start),
        parts_from=parts_from,
        parts_in=None if parted is None else parted.name,
        notes=_notes(a, b),
    )


def _exact_rows(a: LoadedRun, b: LoadedRun, steps: Sequence[int]) -> list[MetricComparison]:
    """Return every metric that both runs have with its first difference, in the order of the stages."""
    metrics = a.record.metrics, b.record.metrics
    names = [{name for step in steps for name in each[step]} for each in metrics]
    rows = [_samples_row(stage, a, b, steps) for stage in SAMPLES]
    for name in sorted(names[0] & names[1]):
        place = placed(name)
        if place is None:
            continue
        # runs may validate at different steps
        is_validation = _NAMES[place[0]] == VALIDATION
        values = [
            (step, metrics[0][step].get(name), metrics[1][step].get(name))
            for step in steps
            if (all if is_validation else any)(name in each[step] for each in metrics)
        ]
        compared = sum(x is not None and y is not None for _, x, y in values)
        row = next(((s, x, y) for s, x, y in values if not _equal_bits(x, y)), (None, None, None))
        rows.append(MetricComparison(name, _NAMES[place[0]], place[1], compared, *row))
    # a stage's completions, then its main metrics
    return sorted(rows, key=lambda row: (_NAMES.index(row.stage), not row.name.startswith(LOGGED), not row.is_main))


def _samples_row(stage: str, a: LoadedRun, b: LoadedRun, steps: Sequence[int]) -> MetricComparison:
    fields = SAMPLES[stage]
    name, compared = f"{LOGGED}: {stage}", 0
    for step in steps:
        pairs = _pairs(a.samples.get(step, ()), b.samples.get(step, ()), of_prompts=stage == "prompts")
        compared += bool(pairs)
        for one, other in pairs:
            values = [tuple(each.get(key) for key in fields) for each in (one, other)]
            if values[0] != values[1]:
                place = next(i for i in range(len(fields)) if values[0][i] != values[1][i])
                shown = [str(each[place]) for each in values]
                return MetricComparison(name, stage, False, compared, step, a=shown[0], b=shown[1])
    return MetricComparison(name, stage, False, compared)


def _pairs(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], *, of_prompts: bool
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the records of a step that correspond: its first prompts in order, else responses of the same prompt.

    The runs may have logged different numbers of them.
    """
    grouped: list[dict[Any, list[Mapping[str, Any]]]] = [{}, {}]
    for groups, records in zip(grouped, (a, b), strict=True):
        for record in records:
            groups.setdefault(record.get("uid"), []).append(record)
    if of_prompts:
        firsts = [[records[0] for records in groups.values()] for groups in grouped]
        return list(zip(*firsts, strict=False))
    return [pair for uid, records in grouped[0].items() for pair in zip(records, grouped[1].get(uid, ()), strict=False)]


def _compared_samples(a: LoadedRun, b: LoadedRun, steps: Sequence[int]) -> int:
    return sum(len(_pairs(a.samples.get(s, ()), b.samples.get(s, ()), of_prompts=False)) for s in steps)


def _equal_bits(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


def _with_noise(row: MetricComparison, a: Metrics, b: Metrics, start: int, tests: int) -> MetricComparison:
    """Return a row with the step from which its curves differ by more than noise.

    Args:
        row: a metric.
        a, b: metrics of the runs.
        start: the first step at which anything differs.
        tests: main metrics that are compared.
    """
    if not row.is_main or row.step is None:
        return row
    shared = [
        (s, a[s][row.name], b[s][row.name])
        for s in sorted(a.keys() & b.keys())
        if row.name in a[s] and row.name in b[s]
    ]
    # a NaN or infinity in one of the runs is no noise
    broken = next((s for s, x, y in shared if math.isfinite(x) != math.isfinite(y)), None)
    pairs = [each for each in shared if math.isfinite(each[1]) and math.isfinite(each[2])]
    parts, errors, limit, smallest = broken, None, None, None
    if len(pairs) >= FEWEST:
        noises = [estimate_noise([each[side] for each in pairs]) for side in (1, 2)]
        places = [i for i, (s, _, _) in enumerate(pairs) if s >= start]
        # a validation measures the weights after its step's update, other metrics those before it
        same_weights = [
            i for i, (s, _, _) in enumerate(pairs) if (s < start if row.stage == VALIDATION else s <= start)
        ]
        if places:
            elapsed = places[0] - same_weights[-1] if same_weights else 0
            test = compare_curves(
                [y - x for _, x, y in pairs],
                *noises,
                start=places[0],
                elapsed=elapsed,
                tests=tests,
            )
            errors, limit, smallest = test.largest, test.limit, test.smallest
            at = None if test.index is None else pairs[test.index][0]
            parts = min((each for each in (broken, at) if each is not None), default=None)
    there = next(((x, y) for s, x, y in shared if s == parts), (None, None))
    return MetricComparison(
        row.name, row.stage, True, row.compared, row.step, row.a, row.b, parts, *there, errors, limit, smallest
    )


def _judge(
    rows: Sequence[MetricComparison], reasons: Sequence[str], steps: Sequence[int], start: int | None
) -> tuple[Verdict, str, MetricComparison | None]:
    """Return the verdict, its headline, and the row in which the runs part."""
    count = f"{len(steps)} shared {'step' if len(steps) == 1 else 'steps'}"
    if start is None:
        return "identical", f"identical to the bit in {count}", None
    equal = _before(steps, start)
    until = "not equal at any step" if equal is None else f"equal to the bit until step {equal}"
    first = min((row for row in rows if row.step is not None), key=_flow_order)
    from_first = f"parts from step {first.step} in {first.name}{_values(first.a, first.b)}; {until}"
    if not reasons:
        return "parts", f"{from_first}; nothing explains a difference: they should be equal to the bit", first
    # the gap of rounding differs from machine to machine: it explains curves that part, and is none of them
    parted = [row for row in rows if row.parts is not None and row.stage != GAP]
    if parted:
        row = min(parted, key=lambda each: (each.parts, _flow_order(each)))
        size = "" if row.errors is None or math.isinf(row.errors) else f", up to {row.errors:.1f} standard errors"
        text = f"parts from step {row.parts} in {row.name}{_values(row.parts_a, row.parts_b)}{size}; {until}"
        return "parts", text, row
    differing = [row for row in rows if row.is_main and row.step is not None]
    if differing and all(row.errors is None for row in differing):
        why = f"fewer than {FEWEST} shared steps have values, too few to estimate noise, so any difference counts"
        return "parts", f"{from_first}; {why}", first
    unjudged = sum(row.errors is None for row in differing)
    rest = f" ({unjudged} metrics have too few values to be judged)" if unjudged else ""
    widest = next((row for name in ("reward", "actor/loss") for row in differing if row.name == name), None)
    if widest is not None and widest.smallest is not None:
        rest += f", where gaps below {widest.smallest:.2g} in {widest.name} are not seen"
    gaps = [(row.parts, row.name) for row in rows if row.parts is not None]
    if gaps:
        rest += "; the gap between engine and trainer differs from step {}, in {}".format(*min(gaps))
    return "within_noise", f"same within noise in {count}{rest}; {until}", None


def _flow_order(row: MetricComparison) -> tuple[float, ...]:
    """Sort by the first difference, and within a step by stage: its completions, its main metrics, further ones."""
    step = math.inf if row.step is None else row.step
    return step, _NAMES.index(row.stage), not row.name.startswith(LOGGED), not row.is_main


def _values(a: float | str | None, b: float | str | None) -> str:
    if isinstance(a, str) or isinstance(b, str):
        return ""
    return f" (A {show(a)}, B {show(b)})"


def show(value: float | str | None) -> str:
    """Return a value in at most 10 characters; "-" for none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.5g}"


def _gap(
    a: Metrics, b: Metrics, steps: Sequence[int], parts: int | None
) -> tuple[int | None, tuple[tuple[str, float | None, float | None], ...]]:
    def rows(step: int) -> tuple[tuple[str, float | None, float | None], ...]:
        names = sorted(
            name
            for name in a[step].keys() | b[step].keys()
            if (place := placed(name)) is not None and _NAMES[place[0]] == GAP
        )
        return tuple((name, a[step].get(name), b[step].get(name)) for name in names)

    measured = [step for step in steps if rows(step)]
    if not measured or parts is None:
        return None, ()
    before = [step for step in measured if step < parts]
    step = before[-1] if before else measured[0]
    return step, rows(step)


def _before(steps: Sequence[int], start: int | None) -> int | None:
    return max((step for step in steps if start is None or step < start), default=None)


def _span(record: RunRecord) -> str:
    steps = sorted(record.metrics)
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _notes(a: LoadedRun, b: LoadedRun) -> tuple[str, ...]:
    notes = []
    for name, run, other in (("A", a, b), ("B", b, a)):
        notes += [f"{name}: {problem}" for problem in run.record.problems]
        if run.record.status == "running":
            notes.append(f"{name} is running: its steps so far are compared")
        if not run.samples and other.samples:
            notes.append(f"{name} logged no completions (observe.completions_per_step), so these are not compared")
    return tuple(notes)
