"""Summary of a run in one table: what training changed, its cost, and the paths of the results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.shown_fields import LOSS, MISSING, decimals, duration, percent, stage_label
from hwgrpo.observe.verdict import judge
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.support.run_files import read_whole, write_whole
from hwgrpo.support.text import terminal_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hwgrpo.observe.warnings import RunWarning

SCHEMA = "hwgrpo.summary/1"
FILE = "summary.json"


def build_summary(
    history: RunHistory,
    *,
    status: str,
    total_steps: int,
    resumed_from: int,
    wall_s: float,
    paths: Mapping[str, Path],
    warnings: Sequence[RunWarning] = (),
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        history: the full run, including the steps before a resume.
        status: how the run ended ("completed", "interrupted", "failed").
        total_steps: steps that were planned.
        resumed_from: step of the checkpoint that this process started from; 0 for none.
        wall_s: seconds this process ran.
        paths: what -> where it lies.
        warnings: those reported during the run, oldest first.

    Returns:
        `{schema, status, verdict: {word, mood, headline, about}, steps, total_steps, resumed_from, wall_s, training_s,
        stages: {name: {seconds, share}}, tokens, tokens_per_s, reward: {first, last, over_steps}, validation:
        [{source, metric, before, after, after_step}], warnings: [{step, name, seen, meaning, remedies}], paths}`.
        In supervised training also `loss: {first, last, over_steps, validation: {before, after, after_step}}`.
        `tokens` counts prompts and responses of all ranks; `tokens_per_s` is over full steps. `over_steps` is 5, or
        half of the steps where there are fewer than 10; after a single step `first` is null. What is not known is null.
        Where `data.validation_max_rows` left rows out, `validation_rows` is "256 of 300 rows".
    """
    spent = history.training_seconds
    stages = {stage: took for stage, took in history.seconds.items() if stage != "step"}
    if history.seconds.get("step", 0.0) > sum(stages.values()):
        stages["other"] = history.seconds["step"] - sum(stages.values())
    step_seconds = history.seconds.get("step", 0.0)
    return {
        "schema": SCHEMA,
        "status": status,
        "verdict": asdict(judge(history, [warning.name for warning in warnings])),
        "steps": history.last_step,
        "total_steps": total_steps,
        "resumed_from": resumed_from,
        "wall_s": wall_s,
        "training_s": spent,
        "stages": {
            stage: {"seconds": took, "share": took / spent if spent else None}
            for stage, took in sorted(stages.items(), key=lambda item: -item[1])
        },
        "tokens": history.tokens,
        "tokens_per_s": history.tokens / step_seconds if step_seconds else None,
        **({"loss": _losses(history)} if history.is_supervised else {}),
        "reward": {"first": history.first_reward, "last": history.last_reward, "over_steps": history.reward_steps},
        "validation": [
            {
                "source": source,
                "metric": metric,
                "before": history.before.get((source, metric)),
                "after": history.after.get((source, metric)),
                "after_step": history.after_step,
            }
            for source, metric in sorted({*history.before, *history.after})
        ],
        **({"validation_rows": history.validation_rows} if history.validation_rows else {}),
        "warnings": [warning.record() for warning in warnings],
        "paths": {what: str(path) for what, path in paths.items()},
    }


def _losses(history: RunHistory) -> dict[str, Any]:
    """Return the losses of supervised training at both ends of the run."""
    ends, validated = history.ends[LOSS], history.validation_losses
    last = max((step for step in validated if step > 0), default=None)
    return {
        "first": statistics.fmean(ends.first) if ends.first else None,
        "last": statistics.fmean(ends.last) if ends.last else None,
        "over_steps": max(1, ends.size),
        "validation": {
            "before": validated.get(0),
            "after": None if last is None else validated[last],
            "after_step": last,
        },
    }


def save_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write summary.json atomically and return its path."""
    path = run_dir / FILE
    write_whole(path, json.dumps(jsonable(summary), indent=2, allow_nan=False))
    return path


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json; empty where it is missing or unreadable."""
    try:
        content = json.loads(read_whole(run_dir / FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _show(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else decimals(digits)(value)


def _metric_label(metric: str) -> str:
    """mean@4 -> sampled (mean of 4)."""
    head, at, count = metric.rpartition("mean@")
    return f"{head}sampled (mean of {count})" if at else metric


def _headline(summary: Mapping[str, Any]) -> str:
    text = f"{summary['status']}: {summary['steps']:,} of {summary['total_steps']:,} steps"
    text += f" in {duration(summary['wall_s'])}"
    return text + (f", resumed from step {summary['resumed_from']:,}" if summary["resumed_from"] else "")


def _changes(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of (what, before, after, change)."""
    rows = []
    for row in summary["validation"]:
        # a run that was stopped has trained on since its last validation
        late = row["after"] is not None and row["after_step"] != summary["steps"]
        when = f" (at step {row['after_step']})" if late else ""
        rows.append((terminal_line(f"{row['source']} {_metric_label(row['metric'])}{when}"), row))
    loss = summary.get("loss")
    ends = loss or summary["reward"]
    if loss and loss["validation"]["after"] is not None:
        rows.append(("validation loss", loss["validation"]))
    rows.append((_ends_label("loss" if loss else "reward", ends), {"before": ends["first"], "after": ends["last"]}))
    table = []
    for what, row in rows:
        before, after = row["before"], row["after"]
        change = MISSING if before is None or after is None else f"{after - before:+.3f}"
        table.append((what, _show(before), _show(after), change))
    return table


def _ends_label(what: str, ends: Mapping[str, Any]) -> str:
    if ends["over_steps"] > 1:
        return f"training {what} (first and last {ends['over_steps']} steps)"
    return f"training {what} ({'only' if ends['first'] is None else 'first and last'} step)"


def _costs(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    stages = [
        f"{stage_label(stage)} {percent(cost['share'])}"
        for stage, cost in summary["stages"].items()
        if (cost["share"] or 0) >= 0.005
    ]
    speed = summary["tokens_per_s"]
    return [
        ("tokens", f"{summary['tokens']:,.0f} (prompts and responses), {_show(speed, 0)} per second"),
        ("time", ", ".join(stages) or MISSING),
    ]


def _warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return the latest warning of each name, as text."""
    latest = {warning["name"]: warning for warning in summary["warnings"]}
    return [terminal_line(f"step {warning['step']}, {name}: {warning['seen']}") for name, warning in latest.items()]


def _paths(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, terminal_line(path)) for name, path in summary["paths"].items()]


def _verdict(summary: Mapping[str, Any]) -> list[str]:
    """Return the verdict's lines that the table does not show; none where all is well."""
    verdict = summary["verdict"]
    return (
        [] if verdict["mood"] in ("good", "muted") else [terminal_line(verdict[part]) for part in ("headline", "about")]
    )


def plain_summary(summary: Mapping[str, Any]) -> str:
    """Return the summary as plain text, for logs."""
    changes = [("", "before", "after", "change"), *_changes(summary)]
    widths = [max(len(row[i]) for row in changes) for i in range(4)]
    lines = [_headline(summary), *_verdict(summary)]
    lines += ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in changes]
    pairs = [*_costs(summary), *(("warning", text) for text in _warnings(summary)), *_paths(summary)]
    width = max(len(name) for name, _ in pairs)
    lines += [f"{name.ljust(width)}  {text}" for name, text in pairs]
    return "\n".join(lines)


def rich_summary(summary: Mapping[str, Any]) -> RenderableType:
    """Return the summary as a panel for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    changes = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    changes.add_column("", overflow="fold")
    for heading in ("before", "after", "change"):
        changes.add_column(heading, justify="right", no_wrap=True)
    for what, before, after, change in _changes(summary):
        better = "-" if "loss" in summary else "+"
        style = "" if change in (MISSING, "+0.000", "-0.000") else "green" if change.startswith(better) else "red"
        changes.add_row(Text(what), before, Text(after, style="bold"), Text(change, style=style))
    pairs = Table.grid(padding=(0, 2, 0, 0))
    pairs.add_column(style="dim", no_wrap=True)
    pairs.add_column(overflow="fold")
    for name, text in _costs(summary):
        pairs.add_row(name, Text(text))
    for text in _warnings(summary):
        pairs.add_row("warning", Text(text, style="yellow"))
    for name, text in _paths(summary):
        pairs.add_row(name, Text(text))
    mood = summary["verdict"]["mood"]
    color = {"bad": "red", "warn": "yellow"}.get(mood, "green" if summary["status"] == "completed" else "yellow")
    title = Text(_headline(summary), style=f"bold {color}")
    verdict = [
        Text(line, style=style) for line, style in zip(_verdict(summary), (f"bold {color}", "dim"), strict=False)
    ]
    return Panel(
        Group(*verdict, *([Text()] if verdict else []), changes, Text(), pairs),
        title=title,
        title_align="left",
        border_style=color,
    )
