"""The live panel: it fits, it leaves out nothing silently, and nothing that a model writes can break it."""

import dataclasses
import io
import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from hwgrpo.observe.completions import Sample
from hwgrpo.observe.console.panel import NOT_EVERY_STEP, LivePanel, PanelView, condense, shorten, sparkline, trend
from hwgrpo.observe.console.progress import Pace
from hwgrpo.observe.shown_fields import decimals
from hwgrpo.training.out_of_memory import LOADING, SAVING, STAGES
from tests.observe.values import METRICS

PACKAGE = Path(__file__).parents[2] / "hwgrpo"
TIMED = {
    next(filter(None, names))
    for file in (PACKAGE / "training").rglob("*.py")
    for names in re.findall(
        r'watch\("(\w+)"\)|"timing_s/(\w+)":|^    timed = "(\w+)"', file.read_text(encoding="utf-8"), re.MULTILINE
    )
}
"""Stages that training times."""
LONG = Sample("<|im_start|>user\n" + "How many? " * 400, "<think>\n" + "计算 " * 5000 + "\\boxed{72}", 0.5, "72" * 200)


def a_view(**changes) -> PanelView:
    pace = Pace(100, ((40, 197.0), (42, 200.0)))
    view = PanelView("tiny_sort", pace, 180.0, lambda: 200.0, step=42, values=METRICS)
    return dataclasses.replace(view, **changes)


def drawn(view: PanelView, width: int, **options) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, legacy_windows=False, **options)
    console.print(view)
    return stream.getvalue().splitlines()


VALUES = (
    METRICS,
    {},
    {"reward": math.nan, "actor/lr": None, "timing_s/gen": math.inf, "timing_s/adv": math.nan},
    {"reward": torch.tensor(0.5), "timing_s/gen": 0.0, "actor/grad_norm": "?"},
    METRICS | {"timing_s/a_stage_with_a_long_name": 99_999.0, "perf/throughput": 1e12},
)


def test_the_panel_fills_its_width_exactly_whatever_is_missing():
    for width, values, sample in product((60, 80, 109, 110, 140, 200), VALUES, (None, Sample("", "", None), LONG)):
        lines = drawn(a_view(values=values, sample=sample, title="run" * 50), width)
        assert {cell_len(line) for line in lines} == {width}, (values, sample)
        assert len(lines) < 32, (width, values, sample)


def test_the_panel_shows_the_numbers_the_stages_and_a_sample():
    view = a_view(sample=Sample("3120=", "0123", 1.0, "0123"), validation="step 40: x greedy 0.953", rewards=(0.1, 0.9))
    text = "\n".join(drawn(view, 80))
    for shown in ("step 42/100", "42%", "eta 1:27", "0.532", "12,345", "0.0005", "0.421", "25%", "update_actor", "48%"):
        assert shown in text
    for shown in (
        "prompt        3120=",
        "response      0123",
        "sample reward 1.000",
        "greedy 0.953",
        "▁█ 0.100 to 0.900",
    ):
        assert shown in text


def test_stages_that_are_not_in_every_step_have_no_bar():
    text = "\n".join(drawn(a_view(values=METRICS | dict.fromkeys(("timing_s/save", "timing_s/probe"), 0.1)), 80))
    assert "gen" in text
    assert "save" not in text
    assert "probe" not in text


@pytest.mark.parametrize(
    "named",
    [
        NOT_EVERY_STEP,
        set(STAGES) - {LOADING, SAVING},
        re.findall(
            r"(\w+): \d", re.findall(r"const STAGES = .*", (PACKAGE / "report/assets/curves.js").read_text())[0]
        ),
    ],
    ids=["panel", "out of memory", "report"],
)
def test_a_stage_that_is_named_is_one_that_training_times(named):
    assert len(named) > 2
    assert set(named) - TIMED == set()


def test_kl_is_shown_only_where_there_is_one_and_other_missing_numbers_are_dashes():
    assert " kl " in "\n".join(drawn(a_view(), 80))
    text = "\n".join(drawn(a_view(values={}), 80))
    assert " kl " not in text
    assert "grad norm     -" in text


def test_long_texts_keep_their_beginning_and_their_end():
    text = "\n".join(drawn(a_view(sample=LONG), 80))
    assert "<think>↵计算" in text
    assert "\\boxed{72}" in text
    assert " … " in text


def test_control_characters_in_a_response_do_not_reach_the_terminal():
    response = "a\x1b[31mb\rc\x07d\x9be\u202ef\tg[red]h"
    text = "\n".join(drawn(a_view(sample=Sample("p", response, 0.0)), 80))
    assert "a·[31mb·c·d·e·f·g[red]h" in text
    assert "\x1b" not in text


def test_shortening_counts_terminal_cells_not_characters():
    for text in ("计" * 50, "a" * 50, "é" * 10, "👍" * 40, "ab计" * 1000):
        for cells in (12, 30, 61):
            assert cell_len(shorten(text, cells)) <= cells
    assert shorten("short", 30) == "short"
    assert shorten("x" * 20 + "y" * 20, 15) == "xxxxxxx … yyyyy"


def test_a_terminal_without_unicode_gets_a_panel_in_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    Console(file=stream, width=80, legacy_windows=False).print(a_view(sample=LONG, rewards=(0.0, 1.0), title="计"))
    stream.flush()
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[0].startswith("+-")
    assert not any(" rewards " in line for line in lines), "a line of blocks would be a line of question marks"


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32m" in "\n".join(drawn(a_view(), 80, force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(code in "\n".join(drawn(a_view(), 80, force_terminal=True)) for code in ("[1;32m", "[36m", "[34m"))


def test_the_line_of_rewards_ignores_what_cannot_be_drawn():
    assert sparkline([0.0, math.nan, 0.5, math.inf, 1.0], 10) == "▁▅█"
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert len(sparkline(range(100), 10)) == 10


def test_the_line_of_rewards_covers_the_run_from_its_first_step():
    assert condense(range(100), 4) == [12.0, 37.0, 62.0, 87.0]
    assert condense([1.0, 2.0], 4) == [1.0, 2.0]
    assert [len(condense(range(n), 40)) for n in (39, 40, 41, 1000)] == [39, 40, 40, 40]
    stream = io.StringIO()
    panel = LivePanel(Console(file=stream, width=80, force_terminal=True, legacy_windows=False), "run", 200)
    panel.begin(100, [0.0] * 100)
    for step in range(101, 201):
        panel.step(step, {"reward": 1.0}, None)
    panel.close()
    assert sparkline(panel.view.rewards, 40) == "▁" * 20 + "█" * 20


@pytest.mark.parametrize("width", [20, 25, 40])
def test_the_scale_beside_the_line_is_that_of_what_is_drawn(width: int):
    values = [100.0, *(i / 100 for i in range(40))]
    line = trend(values, width, decimals(3))
    drawn, low, _, high = line.split()
    assert len(line) <= width
    assert len(drawn) < 41
    condensed = condense(values, len(drawn))
    assert (low, high) == (f"{min(condensed):.3f}", f"{max(condensed):.3f}")
    assert trend([], 40, decimals(3)) == "-"
    assert trend([math.nan, 0.5], 40, decimals(3)) == "▁ 0.500 to 0.500"


def test_a_run_on_a_terminal_shows_its_steps_and_notes_and_gives_the_cursor_back():
    stream = io.StringIO()
    panel = LivePanel(Console(file=stream, width=80, force_terminal=True, legacy_windows=False), "run", 3)
    panel.begin(0)
    panel.validation(0, {"val-core/task://sort/reward/greedy": 0.25})
    for step in (1, 2, 3):
        panel.step(step, METRICS, None)
        panel.note(f"note [bold]{step}[/bold]")
    panel.close()
    text = stream.getvalue()
    assert "step 3/3" in text
    assert "task://sort  greedy 0.250" in text
    assert "note [bold]2[/bold]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
