"""A run's folder: one run at a time, and nothing left by a first start that came to nothing."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import runs
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError, DataError, RewardError
from hwgrpo.training import build, models, output
from hwgrpo.training.output import LOCK, START_FILES, claim

REWARD = """
def score(solution_str):
    raise KeyError("broken")
"""
LATE = """
calls = 0

def score(completions):
    global calls
    calls += 1
    if calls > 1:
        raise KeyError("broken")
    return [len(text) for text in completions]
"""


def everything_in(folder: Path) -> dict[str, bytes | None]:
    """Read a folder, but for what Python compiles beside the files that it imports."""
    found = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in found}


def test_a_runs_folder_is_held_by_one_run_at_a_time(tmp_path: Path):
    held = claim(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"in use by another run \(process {os.getpid()}\)"):
        claim(tmp_path / "run")
    held.close()
    claim(tmp_path / "run").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        claim(tmp_path / "file" / "run")


def write_start_files(folder: Path) -> None:
    for name in START_FILES:
        if "." in name:
            (folder / name).write_text("new")
        else:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "inside").write_text("new")


def test_a_fresh_claim_that_no_step_was_done_under_leaves_neither_files_nor_folders(tmp_path: Path):
    held = claim(tmp_path / "runs/mine")
    write_start_files(tmp_path / "runs/mine")
    held.close()
    assert everything_in(tmp_path) == {}


def test_what_was_there_before_and_what_a_run_does_not_write_stays(tmp_path: Path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    for name in (LOCK, "config.yaml", "notes.txt"):
        (tmp_path / "runs/mine" / name).write_text("old")
    held = claim(tmp_path / "runs/mine")
    write_start_files(tmp_path / "runs/mine")
    (tmp_path / "runs/mine/train.log").write_text("somebody's")
    held.close()
    assert sorted(everything_in(tmp_path / "runs/mine")) == [LOCK, "config.yaml", "notes.txt", "train.log"]


def test_a_folder_that_the_user_made_stays_and_is_empty_again(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    held = claim(tmp_path / "mine")
    write_start_files(tmp_path / "mine")
    held.close()
    assert everything_in(tmp_path) == {"mine": None}


def test_everything_stays_once_the_claim_is_kept(tmp_path: Path):
    held = claim(tmp_path / "mine")
    held.keep()
    write_start_files(tmp_path / "mine")
    before = everything_in(tmp_path)
    held.close()
    assert everything_in(tmp_path) == before


def test_a_lock_file_that_was_taken_away_before_it_was_locked_is_not_taken_for_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = fcntl.flock
    calls = []

    def taken_away(file, operation: int) -> None:
        if not calls:
            (tmp_path / "run" / LOCK).unlink()
            (tmp_path / "run").rmdir()
        calls.append(operation)
        plain(file, operation)

    monkeypatch.setattr(output.fcntl, "flock", taken_away)
    held = claim(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another run"):
        claim(tmp_path / "run")
    held.close()
    assert everything_in(tmp_path) == {}


def test_a_start_in_a_folder_that_another_run_holds_looks_at_no_checkpoint_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"
    held = claim(tmp_path / "run")
    held.keep()
    before = everything_in(tmp_path / "run")
    monkeypatch.setattr(build, "find_checkpoint", lambda *_: pytest.fail("the other run may still write checkpoints"))
    monkeypatch.setattr(build, "load_tokenizer", lambda *_: pytest.fail("that may take long"))
    for words in ((), ("trainer.resume=never",), ("trainer.max_steps=2",)):
        with pytest.raises(ConfigError, match="in use by another run"):
            runs.run(tmp_path / "run", "trainer.max_steps=1", *words)
    assert everything_in(tmp_path / "run") == before
    held.close()


def test_a_checkpoint_that_a_run_saves_while_another_starts_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A start waits for its tokenizer while the run that holds the folder saves its last checkpoint."""
    words = ("trainer.save_every=1", "trainer.validate_at_start=false")
    assert runs.run(tmp_path / "run", *words, "trainer.max_steps=1") == "completed"
    plain = build.load_tokenizer
    refused = []

    def slow(*arguments):
        if not refused:
            refused.append(True)
            with pytest.raises(ConfigError, match="in use by another run"):
                runs.run(tmp_path / "run", *words, "trainer.max_steps=3")
        return plain(*arguments)

    monkeypatch.setattr(build, "load_tokenizer", slow)
    assert runs.run(tmp_path / "run", *words, "trainer.max_steps=2") == "completed"
    assert refused
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


def test_a_finished_run_is_reported_under_its_claim_and_nothing_is_left_of_the_look(tmp_path: Path, capsys):
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"
    (tmp_path / "run" / LOCK).unlink()
    before = everything_in(tmp_path / "run")
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "finished"
    assert "1 of 1 steps are done" in capsys.readouterr().out
    assert everything_in(tmp_path / "run") == before


def test_a_first_start_that_fails_before_the_model_leaves_nothing(tmp_path: Path):
    config = runs.small(tmp_path / "runs/mine")
    config.data.train = "/not/there.jsonl"
    with pytest.raises((ConfigError, DataError)):
        build.build_run(config, BACKEND, 0, 1)
    assert everything_in(tmp_path) == {}


def failing_model(*_, **__):
    raise ConfigError("model.path lacks weights")


def test_a_first_start_that_fails_while_the_model_loads_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_policy", failing_model)
        with pytest.raises(ConfigError, match="lacks weights"):
            runs.run(tmp_path / "runs/mine")
    assert everything_in(tmp_path) == {}


def test_a_first_start_that_fails_with_its_logs_open_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(build.Observer, "resume_from", failing_model)
        with pytest.raises(ConfigError, match="lacks weights"):
            runs.run(tmp_path / "runs/mine")
    assert everything_in(tmp_path) == {}


def test_a_reward_that_raises_before_the_first_step_is_done_leaves_nothing_and_the_mended_run_starts(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "mended.py").write_text("def score(completions): return [len(text) for text in completions]")
    before = everything_in(tmp_path)
    for validates in ("true", "false"):
        words = ("trainer.max_steps=1", "trainer.resume=never", f"trainer.validate_at_start={validates}")
        with pytest.raises(RewardError, match="broken"):
            runs.run(tmp_path / "run", *words, f"reward.functions=['{tmp_path}/rewards.py:score']")
        assert everything_in(tmp_path) == before
    assert runs.run(tmp_path / "run", *words, f"reward.functions=['{tmp_path}/mended.py:score']") == "completed"


def test_a_run_that_fails_after_its_first_step_keeps_what_it_logged(tmp_path: Path):
    (tmp_path / "rewards.py").write_text(LATE)
    words = ("trainer.validate_at_start=false", f"reward.functions=['{tmp_path}/rewards.py:score']")
    with pytest.raises(RewardError, match="broken"):
        runs.run(tmp_path / "run", *words)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]
    assert (tmp_path / "run/config.yaml").is_file()


def test_a_resumed_run_that_fails_at_once_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"
    before = everything_in(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_policy", failing_model)
        with pytest.raises(ConfigError, match="lacks weights"):
            runs.run(tmp_path / "run", "trainer.max_steps=2")
    assert everything_in(tmp_path / "run") == before
    (tmp_path / "rewards.py").write_text(REWARD)
    with pytest.raises(RewardError, match="broken"):
        runs.run(tmp_path / "run", "trainer.max_steps=2", f"reward.functions=['{tmp_path}/rewards.py:score']")
    assert everything_in(tmp_path / "run").keys() == before.keys()
