"""The closing summary: its numbers, its file, its two pictures."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.summary import build_summary, plain_summary, rich_summary, save_summary
from hwgrpo.observe.warnings import RunWarning

GREEDY, SAMPLED = "val-core/task://sort/reward/greedy", "val-core/task://sort/reward/mean@4"


def a_history() -> RunHistory:
    history = RunHistory()
    history.add(0, {GREEDY: 0.25, SAMPLED: 0.125})
    for step in range(1, 11):
        timing = {"timing_s/gen": 0.25, "timing_s/update_actor": 0.125, "timing_s/step": 0.5}
        history.add(step, {"reward": step / 16, "perf/total_num_tokens": 100.0, **timing})
        if step in (5, 10):
            history.add(step, {GREEDY: step / 10, SAMPLED: step / 20})
    return history


def a_summary(history: RunHistory | None = None, **changes) -> dict:
    given: dict[str, Any] = {"status": "completed", "total_steps": 10, "resumed_from": 0, "wall_s": 65.0}
    given["paths"] = {"model": Path("runs/x/final"), "metrics": Path("runs/x/metrics.jsonl")}
    return build_summary(history or a_history(), **(given | changes))


def test_the_summary_says_what_changed_and_what_it_cost():
    assert a_summary() == {
        "schema": "hwgrpo.summary/1",
        "status": "completed",
        "verdict": {
            "word": "rose",
            "mood": "good",
            "headline": "Validation reward (task://sort greedy) rose from 0.250 to 1.000",
            "about": "Validation before training and after step 10; a change counts from 10%. "
            "Training reward rose from 0.188 to 0.500.",
        },
        "steps": 10,
        "total_steps": 10,
        "resumed_from": 0,
        "wall_s": 65.0,
        "training_s": 5.0,
        "stages": {
            "gen": {"seconds": 2.5, "share": 0.5},
            "update_actor": {"seconds": 1.25, "share": 0.25},
            "other": {"seconds": 1.25, "share": 0.25},
        },
        "tokens": 1000.0,
        "tokens_per_s": 200.0,
        "reward": {"first": 3 / 16, "last": 8 / 16, "over_steps": 5},
        "validation": [
            {"source": "task://sort", "metric": "greedy", "before": 0.25, "after": 1.0, "after_step": 10},
            {"source": "task://sort", "metric": "mean@4", "before": 0.125, "after": 0.5, "after_step": 10},
        ],
        "warnings": [],
        "paths": {"model": "runs/x/final", "metrics": "runs/x/metrics.jsonl"},
    }


def test_what_was_never_measured_is_null_and_shown_as_a_dash():
    history = RunHistory()
    history.add(3, {GREEDY: 0.5})
    summary = a_summary(history, paths={}, status="interrupted")
    expected = {"source": "task://sort", "metric": "greedy", "before": None, "after": 0.5, "after_step": 3}
    assert summary["validation"] == [expected]
    assert (summary["tokens_per_s"], summary["reward"]["first"], summary["stages"]) == (None, None, {})
    assert plain_summary(summary).splitlines()[2].split() == ["task://sort", "greedy", "-", "0.500", "-"]


def test_the_file_is_strict_json_even_with_a_validation_that_is_not_a_number(tmp_path):
    history = a_history()
    history.add(10, {GREEDY: math.nan})
    summary = a_summary(history)
    path = save_summary(tmp_path, summary)
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [row["after"] for row in read["validation"]] == ["NaN", 0.5]
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_plain_text_lines_up():
    assert plain_summary(a_summary()).splitlines() == [
        "completed: 10 of 10 steps in 1:05",
        "                                          before  after  change",
        "task://sort greedy                         0.250  1.000  +0.750",
        "task://sort sampled (mean of 4)            0.125  0.500  +0.375",
        "training reward (first and last 5 steps)   0.188  0.500  +0.312",
        "tokens   1,000 (prompts and responses), 200 per second",
        "time     gen 50%, update_actor 25%, other 25%",
        "model    runs/x/final",
        "metrics  runs/x/metrics.jsonl",
    ]


def test_validation_has_the_name_that_the_report_shows():
    summary = a_summary()
    summary["stages"] = {"testing": {"seconds": 1.0, "share": 0.25}}
    assert "time     validation 25%" in plain_summary(summary).splitlines()


@pytest.mark.parametrize("width", [60, 80, 140, 200])
def test_the_terminal_table_fits_and_shows_every_path_whole(width):
    stream = io.StringIO()
    long = Path("/a/rather/long/path/" * 6 + "final")
    Console(file=stream, width=width, legacy_windows=False).print(rich_summary(a_summary(paths={"model": long})))
    lines = stream.getvalue().splitlines()
    assert {cell_len(line) for line in lines} == {width}
    assert str(long) in "".join(line.strip("│ ").removeprefix("model").strip() for line in lines)
    assert "+0.750" in stream.getvalue()


def test_a_validation_before_the_last_step_says_at_which():
    history = a_history()
    history.add(11, {"reward": 0.5})
    lines = plain_summary(a_summary(history, status="interrupted")).splitlines()
    assert lines[2].split() == ["task://sort", "greedy", "(at", "step", "10)", "0.250", "1.000", "+0.750"]
    assert not any("at step" in line for line in plain_summary(a_summary()).splitlines())


def test_the_latest_warning_of_each_kind_is_listed_once():
    warnings = [
        RunWarning(5, "truncation", "40% were cut", "meaning", ("remedy",)),
        RunWarning(7, "KL exploding", "it is 2.0", "meaning", ("remedy",)),
        RunWarning(9, "truncation", "80% were cut", "meaning", ("remedy",)),
    ]
    summary = a_summary(warnings=warnings)
    lines = [line for line in plain_summary(summary).splitlines() if line.startswith("warning")]
    assert lines == ["warning  step 9, truncation: 80% were cut", "warning  step 7, KL exploding: it is 2.0"]
    stream = io.StringIO()
    Console(file=stream, width=80, legacy_windows=False).print(rich_summary(summary))
    assert stream.getvalue().count("80% were cut") == 1


def test_a_run_that_did_harm_is_no_green_success_on_the_terminal():
    history = RunHistory(largest_kl=10.0)
    history.add(0, {GREEDY: 0.59})
    for step in range(1, 11):
        history.add(step, {"reward": 0.5, "kl": 10.0 if step > 5 else 0.1})
    history.add(10, {GREEDY: 0.0})
    summary = a_summary(history)
    lines = plain_summary(summary).splitlines()
    assert lines[1] == "The run collapsed: validation reward (task://sort greedy) fell from 0.590 to 0.000"
    assert "clamp" in lines[2]
    stream = io.StringIO()
    Console(file=stream, width=100, legacy_windows=False, force_terminal=True).print(rich_summary(summary))
    assert "\x1b[1;31m" in stream.getvalue()  # bold red
    assert "\x1b[32m" not in stream.getvalue()  # green


def test_a_resumed_run_says_so():
    assert plain_summary(a_summary(resumed_from=4)).startswith("completed: 10 of 10 steps in 1:05, resumed from step 4")


@pytest.mark.parametrize(
    ("steps", "row"),
    [
        (1, "training reward (only step)              -  0.062       -"),
        (2, "training reward (first and last step)  0.062  0.125  +0.062"),
        (3, "training reward (first and last step)  0.062  0.188  +0.125"),
        (4, "training reward (first and last 2 steps)  0.094  0.219  +0.125"),
        (7, "training reward (first and last 3 steps)  0.125  0.375  +0.250"),
        (9, "training reward (first and last 4 steps)  0.156  0.469  +0.312"),
        (10, "training reward (first and last 5 steps)  0.188  0.500  +0.312"),
        (12, "training reward (first and last 5 steps)  0.188  0.625  +0.438"),
    ],
)
def test_no_step_is_counted_among_the_first_and_the_last(steps: int, row: str):
    history = RunHistory()
    for step in range(1, steps + 1):
        history.add(step, {"reward": step / 16})
    line = next(line for line in plain_summary(a_summary(history)).splitlines() if line.startswith("training reward"))
    assert line.split() == row.split()


def test_before_the_first_step_there_is_no_training_reward():
    reward = a_summary(RunHistory())["reward"]
    assert (reward["first"], reward["last"]) == (None, None)
