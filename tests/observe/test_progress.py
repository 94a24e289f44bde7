"""Lines of progress, and the choice between them and the panel."""

import io
import math

import pytest

from hwgrpo.observe.completions import Sample
from hwgrpo.observe.console.panel import LivePanel
from hwgrpo.observe.console.progress import Pace, PlainLines, Silence
from hwgrpo.observe.console.view import choose_progress
from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.shown_fields import duration, percent, seconds, validation_numbers, validation_texts
from hwgrpo.observe.summary import build_summary
from tests.observe.values import METRICS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(total: int, log_every: int = 1) -> tuple[PlainLines, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return PlainLines(total, log_every, stream, clock), stream, clock


def test_a_step_is_one_line_with_the_numbers_that_matter():
    lines, stream, clock = lines_of(100)
    lines.begin(11)
    clock.now = 0.5
    lines.step(12, METRICS, None)
    assert stream.getvalue() == (
        "step  12/100  reward 0.532  kl 0.001  len 5.0  entropy 0.71  tok/s 12,345  eta 0:44\n"
    )


def test_a_missing_or_odd_metric_is_a_dash_and_the_columns_stay():
    lines, stream, _ = lines_of(100)
    lines.step(1, {"reward": None, "kl": "no number", "response_length/mean": math.nan}, None)
    assert stream.getvalue() == "step   1/100  reward     -  kl     -  len nan  entropy    -  tok/s      -  eta    -\n"


def test_columns_widen_with_the_widest_number_and_then_stay_aligned():
    lines, stream, _ = lines_of(9)
    lines.step(1, METRICS | {"reward": -0.532, "response_length/mean": 1024.0}, None)
    lines.step(2, METRICS, None)
    first, second = stream.getvalue().splitlines()
    assert "reward -0.532  kl 0.001  len 1,024.0" in first
    assert "reward  0.532  kl 0.001  len     5.0" in second


def test_a_small_number_is_not_shown_as_zero():
    lines, stream, _ = lines_of(9)
    lines.step(1, METRICS | {"kl": 0.0001, "actor/entropy": 0.0}, None)
    assert "kl 1e-04" in stream.getvalue()
    assert "entropy 0.00" in stream.getvalue()


def test_only_every_so_many_steps_and_the_last_have_a_line():
    lines, stream, _ = lines_of(7, log_every=3)
    for step in range(1, 8):
        lines.step(step, METRICS, None)
    assert [line[:8] for line in stream.getvalue().splitlines()] == ["step 3/7", "step 6/7", "step 7/7"]


def test_a_validation_is_one_line_per_source():
    lines, stream, _ = lines_of(100)
    values = {
        "val-core/openai/gsm8k/reward/greedy": 0.5,
        "val-core/openai/gsm8k/reward/mean@4": 0.25,
        "val-core/task://sort/acc/greedy": 1.0,
        "val-core/task://sort/reward/std@4": 0.5,
        "timing_s/testing": 2.0,
    }
    lines.validation(40, values)
    assert stream.getvalue().splitlines() == [
        "step  40/100  validation openai/gsm8k  greedy 0.500  mean@4 0.250",
        "step  40/100  validation task://sort  acc greedy 1.000",
    ]
    assert ("openai/gsm8k", "mean@4") in validation_numbers(values)


def test_a_validation_of_some_of_the_rows_says_so_where_it_is_shown():
    values = {"val-core/gsm8k/reward/greedy": 0.5, "val-aux/rows": 256.0, "val-aux/rows_available": 1319.0}
    assert validation_texts(values) == ["gsm8k  greedy 0.500  (256 of 1,319 rows)"]
    assert validation_texts({"val/loss": 2.0, **{k: v for k, v in values.items() if "aux" in k}}) == [
        "loss 2.000  (256 of 1,319 rows)"
    ]
    history = RunHistory()
    history.add(0, values)
    history.add(1, {})
    kept = build_summary(history, status="completed", total_steps=1, resumed_from=0, wall_s=1.0, paths={})
    assert kept["validation_rows"] == "256 of 1,319 rows"
    history = RunHistory()
    history.add(0, {"val-core/gsm8k/reward/greedy": 0.5})
    whole = build_summary(history, status="completed", total_steps=1, resumed_from=0, wall_s=1.0, paths={})
    assert "validation_rows" not in whole


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_stream_that_cannot_write_a_character_does_not_end_the_run(kind, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    progress = choose_progress(kind, title="计算", total_steps=9, log_every=1)
    progress.begin(0)
    progress.step(1, METRICS, Sample("计算", "计算", 1.0))
    progress.note("saved to läufe/计算")
    progress.close()
    assert b"saved to l?ufe/??\n" in raw.getvalue()


def test_the_time_left_follows_the_recent_steps_and_counts_down():
    pace = Pace(100)
    for step in range(30):
        pace = pace.mark(step, 10.0 * step)  # slow at first
    for step in range(30, 60):
        pace = pace.mark(step, 290.0 + 2.0 * (step - 29))
    assert pace.remaining(350.0) == pytest.approx(2.0 * 41)
    assert pace.remaining(351.0) == pytest.approx(2.0 * 41 - 1)
    assert pace.remaining(1e6) == 0.0
    assert Pace(100).mark(0, 5.0).remaining(6.0) is None


def test_times_are_written_for_people():
    assert [duration(t) for t in (0, 12.4, 61, 3723, 180_000, math.nan, None)] == [
        "0:00",
        "0:12",
        "1:01",
        "1:02:03",
        "2d 2:00:00",
        "-",
        "-",
    ]
    assert [seconds(t) for t in (0.042, 0.9999, 3.21, 134)] == ["42 ms", "1.0 s", "3.2 s", "2:14"]
    assert percent(0.256) == "26%"


def test_auto_is_lines_where_there_is_no_terminal_and_a_panel_where_there_is(monkeypatch):
    def chosen(kind):
        return type(choose_progress(kind, title="run", total_steps=9, log_every=1))

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert [chosen(kind) for kind in ("auto", "rich", "plain", "none")] == [PlainLines, LivePanel, PlainLines, Silence]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert chosen("auto") is LivePanel
    monkeypatch.setenv("TERM", "dumb")
    assert chosen("auto") is PlainLines
