"""The one object that the loop talks to."""

import json
import subprocess
import sys

import pytest

from hwgrpo.catalog import LOGGERS
from hwgrpo.config.schema import ObserveConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.observe.loggers.jsonl import read_metrics
from hwgrpo.observe.observer import Observer
from hwgrpo.values import StepMetrics
from tests.observe.values import METRICS, batch_of

GREEDY = "val-core/task://sort/reward/greedy"


def a_config(**changes) -> ObserveConfig:
    return ObserveConfig(**({"loggers": ["jsonl"], "progress": "none", "completions_per_step": 2} | changes))


def run_steps(observer: Observer, steps: range) -> None:
    for step in steps:
        observer.completions(step, *batch_of([2, 2]))
        observer.step(StepMetrics(step, METRICS | {"reward": step / 8}), None)


def test_a_run_leaves_metrics_completions_events_and_a_summary(tmp_path, capsys):
    config = a_config(loggers=["jsonl", "tensorboard"], progress="plain")
    with Observer(config, tmp_path / "run", total_steps=2, is_main=True) as observer:
        observer.resume_from(0)
        observer.validation(0, {GREEDY: 0.25})
        run_steps(observer, range(1, 3))
        observer.validation(2, {GREEDY: 0.75})
        observer.note("checkpoint saved")
        summary = observer.finish("completed", model=tmp_path / "run" / "final")
    assert summary is not None
    made = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert made == ["completions.jsonl", "metrics.jsonl", "summary.json", "tensorboard"]
    assert read_metrics(tmp_path / "run")[2] == METRICS | {"reward": 0.25, GREEDY: 0.75}
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = {"source": "task://sort", "metric": "greedy", "before": 0.25, "after": 0.75, "after_step": 2}
    assert summary["validation"] == [expected]
    assert list(summary["paths"]) == ["model", "metrics", "tensorboard", "completions"]
    shown = capsys.readouterr().out
    for text in (
        "step 2/2  reward 0.250",
        "checkpoint saved",
        "validation task://sort  greedy 0.750",
        "completed: 2 of 2",
    ):
        assert text in shown


def test_on_other_ranks_nothing_is_written_or_shown(tmp_path, capsys):
    observer = Observer(a_config(progress="plain"), tmp_path / "run", total_steps=2, is_main=False)
    observer.resume_from(0)
    observer.validation(0, {GREEDY: 0.25})
    run_steps(observer, range(1, 3))
    observer.note("x")
    assert observer.finish("completed") is None
    observer.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_resumed_run_leaves_the_files_and_the_summary_of_an_uninterrupted_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with Observer(a_config(), whole, total_steps=8, is_main=True) as observer:
        observer.resume_from(0)
        observer.validation(0, {GREEDY: 0.25})
        run_steps(observer, range(1, 9))
        expected = observer.finish("completed")
    killed = Observer(a_config(), broken, total_steps=8, is_main=True)
    killed.resume_from(0)
    killed.validation(0, {GREEDY: 0.25})
    run_steps(killed, range(1, 7))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    with Observer(a_config(), broken, total_steps=8, is_main=True) as observer:
        observer.resume_from(4)
        run_steps(observer, range(5, 9))
        summary = observer.finish("completed")
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert expected is not None
    assert summary is not None
    assert summary["resumed_from"] == 4
    differs = {"resumed_from", "wall_s", "paths"}
    assert {k: v for k, v in summary.items() if k not in differs} == {
        k: v for k, v in expected.items() if k not in differs
    }


def test_starting_over_removes_what_an_attempt_without_checkpoint_logged(tmp_path):
    first = Observer(a_config(), tmp_path, total_steps=8, is_main=True)
    first.validation(0, {GREEDY: 0.25})
    run_steps(first, range(1, 3))
    first.close()
    with Observer(a_config(), tmp_path, total_steps=8, is_main=True) as second:
        second.resume_from(0)
        summary = second.finish("interrupted")
    assert (tmp_path / "completions.jsonl").read_text() == ""
    assert read_metrics(tmp_path) == {}
    assert summary is not None
    assert (summary["steps"], summary["validation"]) == (0, [])


def test_no_completions_are_written_when_none_are_asked_for(tmp_path):
    with Observer(a_config(completions_per_step=0), tmp_path, total_steps=2, is_main=True) as observer:
        run_steps(observer, range(1, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_logger_that_fails_stops_the_run_with_its_name_and_the_remedy(tmp_path, monkeypatch):
    class Full:
        def __init__(self, run_dir):
            pass

        def log(self, step, values):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setitem(LOGGERS._entries, "full", Full)
    observer = Observer(a_config(loggers=["full"]), tmp_path, total_steps=2, is_main=True)
    with pytest.raises(RunError, match=r"logger 'full' could not write step 1 .*No space left.*make room"):
        observer.step(StepMetrics(1, METRICS))


def test_an_unknown_logger_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"observe\.loggers='jsnl' .* Did you mean 'jsonl'"):
        Observer(a_config(loggers=["jsnl"]), tmp_path, total_steps=2, is_main=True)


def test_a_terminal_that_goes_away_ends_the_show_but_not_the_run(tmp_path, monkeypatch, caplog):
    class Gone:
        encoding = "utf-8"

        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self):
            pass

    monkeypatch.setattr("sys.stdout", Gone())
    observer = Observer(a_config(progress="plain"), tmp_path, total_steps=4, is_main=True)
    run_steps(observer, range(1, 5))
    observer.close()
    assert sorted(read_metrics(tmp_path)) == [1, 2, 3, 4]
    assert [record.message for record in caplog.records] == [
        "progress is no longer shown ([Errno 32] Broken pipe); logging continues"
    ]


def test_importing_the_observer_imports_neither_torch_nor_rich():
    code = (
        "import sys, hwgrpo.observe, hwgrpo.observe.observer; "
        "print([m for m in ('torch', 'rich', 'tensorboard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
