"""`hwgrpo bench step` as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hwgrpo.catalog import LAYOUTS, LOGGERS
from hwgrpo.cli.main import main
from tests.bench import wrong_layouts
from tests.support.runs import runs

ROOT = Path(__file__).resolve().parents[2]
TINY = [word for word in runs.SMALL if not word.startswith("observe.")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with another for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def bench(*words: str) -> int:
    return main(["bench", "step", "tiny_sort", *TINY, "--repeat", "2", *words])


def test_stages_and_layouts_are_shown_and_nothing_is_left_on_disk(temporary: Path, capsys: pytest.CaptureFixture[str]):
    assert bench("trainer.output_dir=mine", "--layouts", "padded,grouped") == 0
    shown = capsys.readouterr().out
    for part in ("generate", "reward", "full step", "padded", "grouped *", "4 prompts x 4 samples", "float32", "cpu"):
        assert part in shown, part
    assert "packed" not in shown
    assert "\033" not in shown
    assert all(len(line) <= 100 for line in shown.splitlines() if not line.startswith("note: "))
    assert list(temporary.iterdir()) == []
    assert list(Path.cwd().iterdir()) == []


def test_json_holds_every_sample_under_a_versioned_schema():
    assert bench("--json", "bench.json") == 0
    found = json.loads(Path("bench.json").read_text())
    assert found["schema"] == "hwgrpo.bench.step/1"
    assert set(found) == {
        "schema", "recipe", "overrides", "repeat", "machine", "model", "batch", "chosen", "tolerance", "notes",
        "stages", "layouts", "step",
    }  # fmt: skip
    assert set(found["machine"]) == {
        "backend", "device", "arch", "cores", "load", "threads", "hwgrpo", "torch", "transformers", "python",
    }  # fmt: skip
    assert set(found["model"]) == {"path", "architecture", "parameters", "trainable", "dtype", "attention"}
    assert set(found["batch"]) == {
        "prompts",
        "samples",
        "prompt_tokens",
        "response_tokens",
        "trained_tokens",
        "micro_batch_tokens",
    }
    times = {"wall_s", "cpu_s", "median_s", "min_s", "spread_s"}
    for stage in (*found["stages"].values(), found["step"]):
        assert set(stage) == times
        assert len(stage["wall_s"]) == len(stage["cpu_s"]) == found["repeat"] == 2
        assert stage["min_s"] == min(stage["wall_s"]) <= stage["median_s"]
    assert [layout["name"] for layout in found["layouts"]] == ["padded", "grouped", "grouped_masked", "packed"]
    for layout in found["layouts"]:
        assert set(layout) == times | {
            "name", "state", "reason", "apart", "fed_tokens", "trained_tokens", "flops", "peak_bytes", "ratio",
            "trained_tokens_per_s", "fed_tokens_per_s", "flops_per_s",
        }  # fmt: skip
        assert layout["state"] == "timed"
        assert set(layout["apart"]) == {"loss", "gradient_norm", "gradient"}
        assert layout["fed_tokens_per_s"] == pytest.approx(layout["fed_tokens"] / layout["median_s"])
        assert layout["peak_bytes"] is None, "the host keeps no count"


def test_a_wrong_layout_is_named_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(LAYOUTS._entries, "forgetful", wrong_layouts.FORGETFUL)
    assert bench("--layouts", "forgetful", "--json", "bench.json") == 1
    shown = capsys.readouterr().out
    assert "WRONG: forgetful" in shown
    wrong = json.loads(Path("bench.json").read_text())["layouts"][1]
    assert (wrong["name"], wrong["state"], wrong["wall_s"], wrong["median_s"]) == ("forgetful", "wrong", [], None)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--layouts", "padded,gruoped"], ["--layouts='gruoped'", "Did you mean 'grouped'?"]),
        (["--layouts", ","], ["--layouts", "padded"]),
        (["--repeat", "0"], ["--repeat 0", "1 or more"]),
        (["--threads", "0"], ["--threads 0", "1 or more"]),
        (["--json", "no/such/folder/x.json"], ["--json no/such/folder/x.json", "folder"]),
        (["rollout.temprature=1"], ["Did you mean rollout.temperature?"]),
        (["trainer.strategy=fsdp2"], ["trainer.strategy='fsdp2'", "needs an unsharded policy", "single"]),
        (["trainer.strategy=deepspeed"], ["trainer.strategy='deepspeed'", "needs an unsharded policy", "single"]),
        (["another_recipe"], ["another_recipe", "one recipe"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]):
    assert bench(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    error = shown.err.strip().splitlines()[-1]
    for part in parts:
        assert part in error


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench() == 2
    assert "needs one process, but a launcher started 2" in capsys.readouterr().err


def test_loggers_of_the_recipe_hear_nothing_of_it(monkeypatch: pytest.MonkeyPatch):
    def loud(folder: Path) -> None:
        raise AssertionError(f"a service was told of {folder}")

    monkeypatch.setitem(LOGGERS._entries, "loud", loud)
    assert bench("observe.loggers=[jsonl,loud]", "--layouts", "padded") == 0


def test_threads_win_over_the_recipe():
    assert bench("--threads", "2", "--json", "bench.json", "--layouts", "padded", "trainer.threads=1") == 0
    assert json.loads(Path("bench.json").read_text())["machine"]["threads"] == 2


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        assert list(temporary.iterdir()), "otherwise there would be nothing to clean up"
        raise KeyboardInterrupt

    monkeypatch.setattr("hwgrpo.training.update.policy_update.PolicyUpdate.__call__", interrupted)
    assert bench("--json", "bench.json") == 130
    assert list(temporary.iterdir()) == []
    assert list(Path.cwd().iterdir()) == []


def test_without_a_recipe_the_whole_command_measures_the_small_task_that_ships(tmp_path: Path):
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))
    done = subprocess.run(
        [sys.executable, "-m", "hwgrpo", "bench", "step", "--repeat", "1", *TINY, "--layouts", "packed"],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"},
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny_sort" in done.stdout
    assert "packed" in done.stdout
    assert "warning" not in done.stderr
    assert list((tmp_path / "here").iterdir()) == []


def test_losses_are_compared_with_ppo_clip(capsys: pytest.CaptureFixture[str]):
    assert bench("--losses", "gspo,kl_cov", "--json", "losses.json") == 0
    _, _, gspo, kl_cov = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert gspo.startswith("| gspo | sequence |  |")
    assert kl_cov.startswith("| kl_cov | token | yes |")
    found = json.loads(Path("losses.json").read_text())
    assert found["schema"] == "hwgrpo.bench.losses/1"
    assert [each["name"] for each in found["losses"]] == ["gspo", "kl_cov"]
    assert all(len(each["times"]["wall_s"]) == found["repeat"] == 2 for each in found["losses"])
    assert found["machine"]["threads"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--losses", "gsop"], "--losses='gsop' is not known.*Did you mean 'gspo'"),
        (["--losses", ","], "use names separated by commas, or all"),
        (["--losses", "gspo", "--layouts", "packed"], "two measurements"),
    ],
)
def test_wrong_losses_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert bench(*words) == 2
    assert re.search(message, capsys.readouterr().err)
