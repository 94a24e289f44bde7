"""Warnings: told once, again only for a reason, kept over a resume, and shown wherever a run is."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.schema import ObserveConfig
from hwgrpo.errors import ConfigError
from hwgrpo.observe.console.panel import LivePanel
from hwgrpo.observe.detectors import Finding
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.warnings import AGAIN_STEPS, CLEAR_STEPS, Monitor
from hwgrpo.values import StepMetrics
from tests.observe.values import METRICS

CUT = METRICS | {"response_length/clip_ratio": 0.4}


def told(severities: list[float | None]) -> list[int]:
    """Return the steps at which a sign of these severities (None: no sign) is told."""
    by_step = dict(enumerate(severities, start=1))

    def detect(series, config):
        severity = by_step[series.step]
        return None if severity is None else Finding("seen", "meaning", ("remedy",), severity)

    monitor = Monitor(Config(), {"test": detect})
    for step in by_step:
        monitor.add(step, {})
    return [warning.step for warning in monitor.warnings]


def test_a_sign_that_stays_is_told_once():
    assert told([1.0] * 200) == [1]


def test_a_sign_that_wavers_is_told_once():
    assert told([1.0, None, 1.3, None, None] * 40) == [1]


def test_a_sign_that_doubles_is_told_again_but_not_at_once():
    assert told([1.0] * 40 + [1.9] * 40 + [2.0] * 40 + [3.9] * 40 + [4.0] * 40 + [1.0, 4.0]) == [1, 81, 161]
    assert told([2.0**i for i in range(50)]) == [1, 1 + AGAIN_STEPS, 1 + 2 * AGAIN_STEPS]


def test_a_sign_that_comes_back_after_long_is_told_again():
    assert told([1.0, *[None] * (CLEAR_STEPS - 1), 1.0]) == [1]
    assert told([1.0, *[None] * CLEAR_STEPS, 1.0]) == [1, CLEAR_STEPS + 2]


def test_severity_is_compared_with_that_of_the_last_telling_after_a_return():
    back = CLEAR_STEPS + 2
    assert told([4.0, *[None] * CLEAR_STEPS, *[1.0] * AGAIN_STEPS, 2.0]) == [1, back, back + AGAIN_STEPS]


def a_run(run_dir, steps, *, start=0, total=40, **changes) -> dict:
    config = ObserveConfig(**({"loggers": ["jsonl"], "progress": "plain", "completions_per_step": 0} | changes))
    with Observer(config, run_dir, total_steps=total, is_main=True) as observer:
        observer.resume_from(start)
        for step, values in steps:
            observer.step(StepMetrics(step, values))
        summary = observer.finish("completed")
    assert summary is not None
    return summary


def test_a_warning_is_shown_written_and_listed_at_the_end(tmp_path, capsys):
    summary = a_run(tmp_path, [(step, CUT) for step in range(1, 8)])
    shown = capsys.readouterr().out
    assert "warning at step 5, truncation: 40% of the responses were truncated at the length limit" in shown
    assert "- raise rollout.max_response_tokens (now 512)" in shown
    assert "warning   step 5, truncation: 40%" in shown.split("completed:")[1]
    written = [json.loads(line) for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    assert [(w["step"], w["name"]) for w in written] == [(5, "truncation")]
    assert set(written[0]) == {"step", "name", "seen", "meaning", "remedies"}
    assert summary["warnings"] == written
    assert json.loads((tmp_path / "summary.json").read_text())["warnings"] == written
    assert str(tmp_path / "warnings.jsonl") == summary["paths"]["warnings"]


def test_a_healthy_run_has_no_file_and_no_line_of_warnings(tmp_path, capsys):
    assert a_run(tmp_path, [(step, METRICS) for step in range(1, 8)])["warnings"] == []
    assert not (tmp_path / "warnings.jsonl").exists()
    assert "warning at step" not in capsys.readouterr().out


def test_warnings_can_be_switched_off(tmp_path, capsys):
    summary = a_run(tmp_path, [(step, CUT) for step in range(1, 8)], warnings=False)
    assert summary["warnings"] == []
    assert not (tmp_path / "warnings.jsonl").exists()
    assert "warning at step" not in capsys.readouterr().out


@pytest.mark.parametrize("killed_after", [5, 8, 30])
def test_a_resumed_run_warns_of_what_the_uninterrupted_one_does(tmp_path, killed_after):
    def steps(first, last):
        # truncation sets in at step 6, is told at 7, and again when its mean has doubled
        return [(s, METRICS | {"response_length/clip_ratio": 0.0 if s < 6 else 0.8}) for s in range(first, last + 1)]

    whole = a_run(tmp_path / "whole", steps(1, 40))
    assert [w["step"] for w in whole["warnings"]] == [7, 27], "otherwise this test shows nothing"
    a_run(tmp_path / "broken", steps(1, killed_after))
    resumed = a_run(tmp_path / "broken", steps(5, 40), start=4)
    assert resumed["warnings"] == whole["warnings"]
    assert (tmp_path / "broken/warnings.jsonl").read_text() == (tmp_path / "whole/warnings.jsonl").read_text()


@pytest.mark.parametrize("lost", [False, True])
def test_a_warning_that_was_told_before_a_resume_is_neither_told_again_nor_lost(tmp_path, capsys, lost):
    a_run(tmp_path, [(step, CUT) for step in range(1, 8)])
    if lost:  # as after a run of a version that wrote none
        (tmp_path / "warnings.jsonl").unlink()
    capsys.readouterr()
    a_run(tmp_path, [(step, CUT) for step in range(8, 12)], start=7)
    assert "warning at step" not in capsys.readouterr().out
    assert json.loads((tmp_path / "warnings.jsonl").read_text())["step"] == 5


def test_starting_over_forgets_the_warnings_of_the_earlier_attempt(tmp_path):
    a_run(tmp_path, [(step, CUT) for step in range(1, 8)])
    summary = a_run(tmp_path, [(step, METRICS) for step in range(1, 8)])
    assert summary["warnings"] == []
    assert (tmp_path / "warnings.jsonl").read_text() == ""


def test_advice_reads_the_settings_from_the_folder_of_the_run(tmp_path, capsys):
    config = Config()
    config.model.path, config.data.train = "m", "d"
    config.rollout.max_response_tokens = 77
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    a_run(tmp_path, [(step, CUT) for step in range(1, 8)])
    assert "rollout.max_response_tokens (now 77)" in capsys.readouterr().out


def test_settings_of_another_version_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "config.yaml").write_text("rollout: {no_such_key: 1}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml does not fit .*no_such_key.*name another trainer\.output_dir"):
        a_run(tmp_path, [])


def test_the_panel_prints_a_warning_above_itself_word_for_word():
    stream = io.StringIO()
    panel = LivePanel(Console(file=stream, width=100, force_terminal=False), "run", 3)
    panel.warning("warning at step 5, truncation: [bold]40%[/bold]\n  - raise x")
    assert stream.getvalue().splitlines() == ["warning at step 5, truncation: [bold]40%[/bold]", "  - raise x"]


def test_a_monitor_is_a_function_of_metrics_and_settings():
    def run() -> list:
        monitor = Monitor(Config())
        for step in range(1, 30):
            monitor.add(step, CUT | {"kl": 2.0})
        return [dataclasses.astuple(warning) for warning in monitor.warnings]

    assert run() == run()
    assert {warning[1] for warning in run()} == {"truncation", "KL exploding"}
