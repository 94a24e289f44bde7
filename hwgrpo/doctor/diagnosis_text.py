"""The report as text: aligned columns, long cells wrapped. Our own text is ASCII, whatever the locale.

It uses no table library, since it must work in a broken environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hwgrpo_backends.finding import Finding

from hwgrpo import __version__
from hwgrpo.doctor.diagnosis import Report
from hwgrpo.support.terminal_width import fold

COLORS = {"ok": "32", "warn": "33", "FAIL": "1;31", "PASS": "32", "SKIP": "33", "dim": "2", "bold": "1", "": ""}
LABELS = {"ok": "works", "unverified": "found", "unusable": "unusable"}
"""Verdict -> its label in the text."""

Paint = Callable[[str, str], str]
"""(text, name of a color) -> text."""


def plain(text: str, color: str) -> str:
    """Leave the text as it is."""
    return text


def colored(text: str, color: str) -> str:
    """Return the text with the terminal codes of a color."""
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m" if COLORS[color] else text


def show(report: Report, width: int = 100, paint: Paint = plain) -> str:
    """Return the report in lines of at most `width` columns, except for unbreakable words."""
    sections = [_checks(report, width, paint), _candidates(report, width, paint)]
    if report.decision.selected is not None:
        sections += [_kernels(report, width, paint), _attention(report, width, paint), _engines(report, width, paint)]
    if report.self_tests is not None:
        sections.append(_self_tests(report, width, paint))
    sections.append(_conclusion(report, width, paint))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _checks(report: Report, width: int, paint: Paint) -> list[str]:
    column = max(len(finding.what) for finding in report.findings)
    lines = [paint(f"hwgrpo {__version__} doctor", "bold"), ""]
    for finding in report.findings:
        lines += _check(finding, min(column, 24), width, paint)
    return lines


def _check(finding: Finding, column: int, width: int, paint: Paint) -> list[str]:
    indent = 4 + 2 + column + 2
    first, *rest = fold(finding.found, width - indent)
    name = f"{finding.what:<{column}}"
    lines = [f"{paint(f'{finding.state:<4}', finding.state)}  {name}  {first}"]
    if len(name) > column:  # too long for its column: the finding starts on the next line
        lines = [f"{paint(f'{finding.state:<4}', finding.state)}  {name}", " " * indent + first]
    lines += [" " * indent + line for line in rest]
    if finding.fix:
        lines += [" " * indent + line for line in fold(f"fix: {finding.fix}", width - indent, "     ")]
    return lines


def _candidates(report: Report, width: int, paint: Paint) -> list[str]:
    decision = report.decision
    rows = []
    for name, verdict in decision.verdicts.items():
        selected = name == decision.selected
        color = "ok" if selected else "" if verdict.usable else "dim"
        rows.append((f"{'*' if selected else ' '} {name}", LABELS[verdict.state], verdict.reason, color))
        if verdict.fix:
            rows.append(("", "", f"fix: {verdict.fix}", color))
        if name in report.hardware:
            rows.append(("", "", f"tested on: {report.hardware[name]}", "dim"))
    return [paint("backends", "bold"), *_table(rows, width, paint)]


def _kernels(report: Report, width: int, paint: Paint) -> list[str]:
    kernels = report.survey.get("kernels")
    if not kernels or kernels.get("error"):
        reason = kernels["error"] if kernels else "torch does not import"
        return [paint("kernels", "bold"), f"  not available: {reason}"]
    labels = {"chosen": ("runs", "ok"), "usable": ("not selected", ""), "impossible": ("cannot run", "dim")}
    rows = []
    for op in kernels["ops"]:
        for number, each in enumerate(op["verdicts"]):
            label, color = labels[each["state"]]
            mark = "*" if each["state"] == "chosen" else " "
            rows.append(
                (f"  {op['op'] if number == 0 else ''}", f"{mark} {each['name']}", label, each["reason"], color)
            )
        if op["error"]:
            rows.append((f"  {op['op']}", "", "FAIL", op["error"], "FAIL"))
    title = (
        paint("kernels", "bold")
        + f" ({report.decision.selected}, {kernels['dtype']}, vocabulary of {kernels['vocab']:,})"
    )
    return [title, *_table(rows, width, paint)]


def _attention(report: Report, width: int, paint: Paint) -> list[str]:
    implementations = report.survey.get("attention")
    if not isinstance(implementations, list):
        return []
    first = next((each["name"] for each in implementations if each["reason"] is None), None)
    rows = []
    for each in implementations:
        label = "first" if each["name"] == first else "usable" if each["reason"] is None else "unusable"
        reason = each["reason"] or ("used where the model and the layout allow it" if each["name"] == first else "")
        if each["kernels"]:
            reason = f"by {' or '.join(each['kernels'])}" + (f"; {reason}" if reason else "")
        mark = "*" if each["name"] == first else " "
        rows.append((f"{mark} {each['name']}", label, reason, "ok" if each["name"] == first else ""))
    return [paint("attention", "bold"), *_table(rows, width, paint)]


def _engines(report: Report, width: int, paint: Paint) -> list[str]:
    first = next((engine.name for engine in report.engines if engine.usable), None)
    rows = [
        (f"{'*' if engine.name == first else ' '} {engine.name}", "usable" if engine.usable else "unusable",
         engine.reason, "ok" if engine.name == first else "")
        for engine in report.engines
    ]  # fmt: skip
    return [paint("rollout engines", "bold"), *_table(rows, width, paint)]


def _self_tests(report: Report, width: int, paint: Paint) -> list[str]:
    title = paint("self-tests on the device", "bold")
    if not report.self_tests:
        return [title, "  SKIP  no self-test ran: no backend could be selected, or torch does not import"]
    rows = [(f"  {t.state}", t.device, t.name, t.detail, t.state) for t in report.self_tests]
    return [title, *_table(rows, width, paint)]


def _conclusion(report: Report, width: int, paint: Paint) -> list[str]:
    decision, warnings = report.decision, sum(finding.state == "warn" for finding in report.findings)
    counted = f"{warnings} warning{'' if warnings == 1 else 's'}" if warnings else "no warnings"
    if decision.selected is None:
        return [paint(f"no backend (requested: {decision.requested}); see FAIL above", "FAIL")]
    origin = "inherited from the launcher" if decision.inherited else f"requested: {decision.requested}"
    line = f"backend: {decision.selected} ({origin}), {counted}"
    if report.failures:
        lines = fold(f"failed: {', '.join(report.failures)}", width, "  ")
        return fold(line, width) + [paint(each, "FAIL") for each in lines]
    return fold(line, width)


def _table(rows: Sequence[tuple[str, ...]], width: int, paint: Paint) -> list[str]:
    """Align rows of cells; the last cell is wrapped, and the name of a color follows it."""
    columns = len(rows[0]) - 2
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    indent = sum(widths) + 2 * columns
    lines = []
    for row in rows:
        start = "  ".join(f"{cell:<{size}}" for cell, size in zip(row[:columns], widths, strict=True))
        first, *rest = fold(row[columns], width - indent)
        lines += [
            paint(line.rstrip(), row[-1]) for line in (f"{start}  {first}", *(" " * indent + line for line in rest))
        ]
    return lines
