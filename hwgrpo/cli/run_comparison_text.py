"""A comparison of two runs as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hwgrpo.report.compared_metrics import STAGES
from hwgrpo.report.loaded_run import LoadedRun
from hwgrpo.report.run_comparison import LOGGED, MetricComparison, RunComparison, show
from hwgrpo.support.terminal_width import fold
from hwgrpo.support.text import terminal_line

COLUMNS = 100
_NAME = 33
"""Columns of a metric's name."""
_VALUE = 24
"""Characters of a text, such as a response, in a table."""
_GROUPS = {
    "settings": "settings that differ",
    "versions": "versions that differ",
    "machine": "machine",
    "data": "data and code of your own",
    "start": "start",
}


def comparison_text(a: LoadedRun, b: LoadedRun, result: RunComparison, *, every: bool, columns: int | None) -> str:
    """Return the comparison as text; the verdict is the last line.

    Args:
        a, b: the runs.
        result: their comparison.
        every: show every metric that differs, not only the main ones.
        columns: width of the terminal; None: 100.
    """
    width = columns or COLUMNS
    lines = [line for name, run in (("A", a), ("B", b)) for line in fold(_run_line(name, run), width, "  ")]
    compared = sum(row.compared > 0 for row in result.metrics if not row.name.startswith(LOGGED))
    lines += fold(
        f"compared: {len(result.steps)} shared steps ({result.steps[0]} to {result.steps[-1]}), {compared} metrics, "
        f"{result.completions} logged completions",
        width,
        "  ",
    )
    for name, only in (("A", result.only_a), ("B", result.only_b)):
        if only:
            lines += fold(f"logged by {name} alone: {', '.join(map(terminal_line, only))}", width, "  ")
    for note in result.notes:
        lines += fold(f"note: {terminal_line(note)}", width, "  ")
    expected = "not expected to be equal to the bit (" + "; ".join(map(terminal_line, result.reasons)) + ")"
    lines += fold(expected if result.reasons else "expected to be equal to the bit: any difference counts", width, "  ")
    lines += ["", *_metrics(result, every)]
    title = "what else differs" if result.verdict == "identical" else "what explains it"
    lines += ["", title, *_explanations(result, width)]
    if result.gap:
        lines += ["", f"log-probs of engine and trainer at step {result.gap_step}"]
        name = max(len(row[0]) for row in result.gap)
        lines.append(f"  {'':{name}}  {'A':>10}  {'B':>10}")
        lines += [f"  {metric:{name}}  {show(x):>10}  {show(y):>10}" for metric, x, y in result.gap]
    return "\n".join([*lines, "", *fold(f"verdict: {terminal_line(result.headline)}", width, "  ")])


def _run_line(name: str, run: LoadedRun) -> str:
    steps = sorted(run.record.metrics)
    span = f"steps {steps[0]} to {steps[-1]}"
    return f"{name}: {terminal_line(str(run.record.folder))}, {span}, {terminal_line(run.record.status)}"


def _metrics(result: RunComparison, every: bool) -> list[str]:
    lines = [
        "first difference per metric, in the order of a step (= equal to the bit). Beyond noise: the step",
        "from which curves part, or no: the largest gap and the least that counts, in standard errors (se)",
        f"  {'':{_NAME}}  {'step':>5}  {'A':>10}  {'B':>10}  {'B - A':>9}  beyond noise",
    ]
    for stage in STAGES:
        rows = [row for row in result.metrics if row.stage == stage.name and row.compared]
        different = [row for row in rows if row.step is not None]
        if not rows:
            continue
        if not different:
            lines.append(f"{stage.name} =")
            continue
        shown = [row for row in different if every or row.is_main or row.name.startswith(LOGGED)]
        shown = shown or [min(different, key=lambda row: (row.step, row.name))]
        shown = _without_repeats(shown)
        lines += [stage.name, *(line for row in shown for line in _row(row))]
        rest = len(different) - len(shown)
        if rest and not every:
            first = min(row.step for row in different if row.step is not None)
            lines.append(f"  and {rest} further, the first at step {first} (--all)")
    return lines


def _without_repeats(rows: Sequence[MetricComparison]) -> list[MetricComparison]:
    """Drop metrics that are another name of the one before, as far as the table shows."""
    kept: dict[tuple[object, ...], MetricComparison] = {}
    for row in rows:
        kept.setdefault((row.step, row.a, row.b, row.parts, row.errors), row)
    return list(kept.values())


def _row(row: MetricComparison) -> Iterable[str]:
    name = terminal_line(row.name)
    if isinstance(row.a, str) or isinstance(row.b, str):
        yield f"  {name:{_NAME}}  {row.step:>5}  {_cut(row.a)} | {_cut(row.b)}"
        return
    gap = "-" if row.a is None or row.b is None else f"{row.b - row.a:+.2g}"
    if len(name) > _NAME:
        yield f"  {name}"
        name = ""
    line = f"  {name:{_NAME}}  {row.step:>5}  {show(row.a):>10}  {show(row.b):>10}  {gap:>9}"
    yield f"{line}  {_beyond_noise(row)}".rstrip()


def _beyond_noise(row: MetricComparison) -> str:
    if not row.is_main:
        return ""
    if row.errors is None:
        return "too few values" if row.parts is None else f"step {row.parts}"
    if row.parts is not None:
        return f"step {row.parts}" + ("" if row.errors == float("inf") else f" ({row.errors:.0f} se)")
    return f"no ({row.errors:.1f} of {row.limit:.1f} se)"


def _cut(value: object) -> str:
    text = terminal_line(str(value))
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 3]}..."


def _explanations(result: RunComparison, width: int) -> list[str]:
    lines: list[str] = []
    for group, title in _GROUPS.items():
        rows = [each for each in result.differences if each.group == group]
        if not rows:
            continue
        lines.append(f"  {title}: A | B")
        for each in rows:
            lines += [
                f"    {line}" for line in fold(terminal_line(f"{each.name}: {each.a} | {each.b}"), width - 4, "  ")
            ]
    if result.warnings:
        lines.append("  warnings of one run alone")
        for each in result.warnings:
            text = terminal_line(f"{each.run}, step {each.step}, {each.name}: {each.seen}")
            lines += [f"    {line}" for line in fold(text, width - 4, "  ")]
    if not lines:
        lines.append("  nothing: settings, versions, machine, data and start are recorded as the same")
    return lines
