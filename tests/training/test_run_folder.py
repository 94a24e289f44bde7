"""A run's folder: one run at a time, and nothing left by a first start that came to nothing."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError, DataError, RewardError, RunError
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.report.run_data import read_run
from hwgrpo.support import file_systems
from hwgrpo.training import finish, loop, model_setup, resume, setup
from hwgrpo.training import run_folder as output
from hwgrpo.training.interrupt import Interrupt
from hwgrpo.training.run_folder import LOCK, START_FILES, lock_folder
from tests.support.runs import runs

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
    held = lock_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"in use by another run \(process {os.getpid()}\)"):
        lock_folder(tmp_path / "run")
    held.close()
    lock_folder(tmp_path / "run").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        lock_folder(tmp_path / "file" / "run")


def write_start_files(folder: Path) -> None:
    for name in START_FILES:
        if "." in name:
            (folder / name).write_text("new")
        else:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "inside").write_text("new")


def test_a_fresh_lock_that_no_step_was_done_under_leaves_neither_files_nor_folders(tmp_path: Path):
    held = lock_folder(tmp_path / "runs/mine")
    write_start_files(tmp_path / "runs/mine")
    held.close()
    assert everything_in(tmp_path) == {}


def test_what_was_there_before_and_what_a_run_does_not_write_stays(tmp_path: Path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    for name in (LOCK, "config.yaml", "notes.txt"):
        (tmp_path / "runs/mine" / name).write_text("old")
    held = lock_folder(tmp_path / "runs/mine")
    write_start_files(tmp_path / "runs/mine")
    (tmp_path / "runs/mine/train.log").write_text("somebody's")
    held.close()
    assert sorted(everything_in(tmp_path / "runs/mine")) == [LOCK, "config.yaml", "notes.txt", "train.log"]


def test_a_folder_that_the_user_made_stays_and_is_empty_again(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    held = lock_folder(tmp_path / "mine")
    write_start_files(tmp_path / "mine")
    held.close()
    assert everything_in(tmp_path) == {"mine": None}


def test_everything_stays_once_the_lock_is_kept(tmp_path: Path):
    held = lock_folder(tmp_path / "mine")
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

    monkeypatch.setattr(file_systems.fcntl, "flock", taken_away)
    held = lock_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another run"):
        lock_folder(tmp_path / "run")
    held.close()
    assert everything_in(tmp_path) == {}


def test_a_start_in_a_folder_that_another_run_holds_looks_at_no_checkpoint_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"
    held = lock_folder(tmp_path / "run")
    held.keep()
    before = everything_in(tmp_path / "run")
    monkeypatch.setattr(resume, "find_checkpoint", lambda *_: pytest.fail("the other run may still write checkpoints"))
    monkeypatch.setattr(setup, "load_tokenizer", lambda *_: pytest.fail("that may take long"))
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
    plain = setup.load_tokenizer
    refused = []

    def slow(*arguments):
        if not refused:
            refused.append(True)
            with pytest.raises(ConfigError, match="in use by another run"):
                runs.run(tmp_path / "run", *words, "trainer.max_steps=3")
        return plain(*arguments)

    monkeypatch.setattr(setup, "load_tokenizer", slow)
    assert runs.run(tmp_path / "run", *words, "trainer.max_steps=2") == "completed"
    assert refused
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


def test_a_finished_run_is_reported_under_its_lock_and_nothing_is_left_of_the_look(tmp_path: Path, capsys):
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
        setup.build_run(config, BACKEND, 0, 1)
    assert everything_in(tmp_path) == {}


def failing_model(*_, **__):
    raise ConfigError("model.path lacks weights")


def test_a_first_start_that_fails_while_the_model_loads_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_setup, "load_policy", failing_model)
        with pytest.raises(ConfigError, match="lacks weights"):
            runs.run(tmp_path / "runs/mine")
    assert everything_in(tmp_path) == {}


def test_a_first_start_that_fails_with_its_logs_open_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(setup.Observer, "resume_from", failing_model)
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
        patch.setattr(model_setup, "load_policy", failing_model)
        with pytest.raises(ConfigError, match="lacks weights"):
            runs.run(tmp_path / "run", "trainer.max_steps=2")
    assert everything_in(tmp_path / "run") == before
    (tmp_path / "rewards.py").write_text(REWARD)
    with pytest.raises(RewardError, match="broken"):
        runs.run(tmp_path / "run", "trainer.max_steps=2", f"reward.functions=['{tmp_path}/rewards.py:score']")
    kept = [path for path in everything_in(tmp_path / "run") if not path.startswith("code/")]  # copies add up
    assert kept == [path for path in before if not path.startswith("code/")]


def test_a_run_keeps_its_id_when_it_is_started_again_and_a_broken_one_is_replaced(tmp_path: Path):
    ids = []
    for text in (None, None, "", "broken off"):
        if text is not None:
            (tmp_path / "run" / output.RUN_ID).write_text(text)
        held = lock_folder(tmp_path / "run")
        held.keep()
        ids.append(held.run_id)
        held.close()
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert (tmp_path / "run" / output.RUN_ID).read_text().strip() == ids[-1]


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


def replace(folder: Path) -> None:
    rename(folder)
    folder.mkdir()


def rename_parent(folder: Path) -> None:
    folder.parent.rename(folder.parent.with_name("renamed"))


MOVES = {
    "renamed": (rename, "was moved to '{top}/runs/renamed'", "runs/renamed"),
    "renamed and another in its place": (replace, "was moved to '{top}/runs/renamed'", "runs/renamed"),
    "in a folder that is renamed": (rename_parent, "was moved to '{top}/renamed/mine'", "renamed/mine"),
    "removed": (shutil.rmtree, "was removed or moved", None),
}


@pytest.mark.parametrize(
    ("when", "move"),
    [
        *(("in a step", move) for move in MOVES),
        ("in the first step", "renamed"),
        ("before the last save", "renamed"),
        ("before the final model", "renamed"),
        ("before the final model", "removed"),
    ],
)
def test_a_folder_that_is_moved_while_training_ends_the_run_with_both_paths_and_nothing_new(
    tmp_path: Path, move: str, when: str, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "runs/mine"
    change, said, now = MOVES[move]
    places = {
        "in the first step": (loop, "train_step", 1),
        "in a step": (loop, "train_step", 2),
        "before the last save": (loop, "validate_now", 3),
        "before the final model": (finish, "full_model", None),
    }
    module, name, step = places[when]
    plain = getattr(module, name)

    def moving(run, *arguments):
        if arguments in ((step,), ()):
            run.saver.wait()
            change(output)
        return plain(run, *arguments)

    words = ("trainer.save_every=1", "trainer.max_steps=3", "trainer.validate_at_start=false")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, moving)
        with pytest.raises(RunError, match=re.escape(said.format(top=tmp_path))) as error:
            runs.run(output, *words)
    assert str(output) in str(error.value)
    if now is None:
        assert not output.exists()
        return
    assert not output.exists() or not list(output.iterdir())
    left = [path.name for path in (tmp_path / now).rglob("*") if ".partial" in path.name]
    assert left == []
    assert runs.run(tmp_path / now, *words) == "completed"


def test_something_in_the_place_of_what_a_run_writes_is_named_before_it_starts(tmp_path: Path):
    for name in ("checkpoints", "final", "final-adapter"):
        (tmp_path / name).write_text("precious")
        with pytest.raises(ConfigError, match=f"writes a folder {name}.*move .*/{name} away"):
            lock_folder(tmp_path)
        (tmp_path / name).unlink()
    for name in ("metrics.jsonl", "summary.json", "micro_batch.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=f"writes a file {name}.*move .*/{name} away"):
            lock_folder(tmp_path)
        (tmp_path / name).rmdir()
    lock_folder(tmp_path).close()


@pytest.mark.parametrize("name", ["final", "final-adapter", "final-online_reward_model"])
def test_a_link_in_the_place_of_the_final_model_is_refused_before_the_first_step_and_by_the_dry_run(
    tmp_path: Path, name: str
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    words = ()
    if "online" in name:
        verifier = "verifier: exact_match, warmup_steps: 1"
        words = (f"reward.functions=[{{name: online_reward_model, kwargs: {{{verifier}}}}}]",)
    config = runs.small(tmp_path / "run", *words)
    (problem,) = make_plan(config, BACKEND, 1).problems
    assert f"{tmp_path}/run/{name} is a symbolic link" in problem
    with pytest.raises(ConfigError, match=re.escape(problem)):
        setup.build_run(config, BACKEND, 0, 1)


def test_a_link_in_the_place_of_a_final_model_that_the_run_does_not_replace_is_accepted(tmp_path: Path, capsys):
    words = ("trainer.max_steps=1", "trainer.validate_at_start=false")
    assert runs.run(tmp_path / "run", *words) == "completed"
    (tmp_path / "run/final").rename(tmp_path / "elsewhere")
    (tmp_path / "run/final").symlink_to(tmp_path / "elsewhere")
    assert make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).problems == ()
    assert runs.run(tmp_path / "run", *words) == "finished"
    more = ("trainer.max_steps=2", "trainer.validate_at_start=false")
    with pytest.raises(ConfigError, match="final is a symbolic link, and the run replaces this folder"):
        runs.run(tmp_path / "run", *more)
    assert make_plan(runs.small(tmp_path / "run", *more, "trainer.save_final_model=false"), BACKEND, 1).problems == ()
    assert runs.run(tmp_path / "run", *more, "trainer.save_final_model=false") == "completed"
    assert (tmp_path / "elsewhere/model.safetensors").is_file()


def test_a_signal_while_the_final_model_is_written_still_leaves_model_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = finish.save_model

    def asked_to_end(*arguments, **named) -> None:
        signal.raise_signal(signal.SIGTERM)
        plain(*arguments, **named)

    monkeypatch.setattr(finish, "save_model", asked_to_end)
    before = signal.getsignal(signal.SIGTERM)
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.max_steps=1")) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    assert (tmp_path / "run/final/model.safetensors").is_file()


def test_a_second_request_after_one_in_the_last_step_ends_the_run_while_the_final_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = setup.build_run(runs.small(tmp_path / "run", "trainer.max_steps=1"), BACKEND, 0, 1)
    plain = parts.record_kernels

    def asked_to_end() -> None:
        signal.raise_signal(signal.SIGINT)
        plain()

    parts.record_kernels = asked_to_end
    monkeypatch.setattr(finish, "save_model", lambda *_, **named: signal.raise_signal(signal.SIGINT))
    try:
        status = loop.train(parts)
        assert status == "completed"
        with pytest.raises(KeyboardInterrupt):
            finish.finish(parts, status)
    finally:
        parts.close()


def test_a_connection_that_fails_at_the_last_barrier_is_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def closed() -> None:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    parts = setup.build_run(runs.small(tmp_path / "run", "trainer.max_steps=1"), BACKEND, 0, 1)
    try:
        status = loop.train(parts)
        monkeypatch.setattr(parts.strategy, "barrier", closed)
        with pytest.raises(RunError, match=r"the connection to another rank failed .*start the run again"):
            finish.finish(parts, status)
    finally:
        parts.close()


def test_the_remedy_of_a_failed_save_trusts_the_models_code_where_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finish, "save_model", full)
    parts = setup.build_run(runs.small(tmp_path / "run", "trainer.max_steps=1"), BACKEND, 0, 1)
    try:
        status = loop.train(parts)
        parts.config.model.trust_remote_code = True
        with pytest.raises(RunError, match=r"hwgrpo export .*/step-00000001 OUT --trust-remote-code$"):
            finish.finish(parts, status)
    finally:
        parts.close()


def test_a_file_in_the_place_of_something_half_written_is_removed(tmp_path: Path):
    words = ("trainer.save_every=1", "trainer.keep_checkpoints=1")
    assert runs.run(tmp_path / "run", *words, "trainer.max_steps=1") == "completed"
    root = tmp_path / "run/checkpoints"
    for name in (".step-00000002.partial", ".step-00000001.partial", ".step-00000007.partial", "step-00000009"):
        (root / name).write_text("")
    (root / "step-00000009.abandoned").write_text("")
    (tmp_path / "run/.final.partial").write_text("")
    assert runs.run(tmp_path / "run", *words, "trainer.max_steps=2") == "completed"
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000009.abandoned"]
    assert (tmp_path / "run/final/model.safetensors").is_file()
    assert not (tmp_path / "run/.final.partial").exists()


def test_a_final_model_that_cannot_be_written_ends_the_run_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(model, tokenizer, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(finish, "save_model", full)
        with pytest.raises(
            RunError, match=r"could not be written to .*No space left.*start again.*hwgrpo export .*step-"
        ):
            runs.run(tmp_path / "run", "trainer.max_steps=1")
    assert not (tmp_path / "run/.final.partial").exists()
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"


def test_a_dry_run_locks_nothing(tmp_path: Path):
    make_plan(runs.small(tmp_path / "run"), BACKEND, 1)
    assert everything_in(tmp_path) == {}
    held = lock_folder(tmp_path / "run")
    make_plan(runs.small(tmp_path / "run"), BACKEND, 1)
    held.close()


def interrupted(*numbers: int) -> str | None:
    """Return what an interrupt remembers of signals that this process sends itself."""
    with Interrupt() as interrupt:
        for number in numbers:
            signal.raise_signal(number)
        return interrupt.received


def test_a_closed_terminal_stops_a_run_unless_it_was_told_to_ignore_that():
    assert interrupted(signal.SIGHUP) == "SIGHUP"
    assert interrupted(signal.SIGHUP, signal.SIGHUP) == "SIGHUP", "a terminal that closes may send several"
    assert interrupted(signal.SIGTERM, signal.SIGHUP) == "SIGTERM", "as a logout does"
    with pytest.raises(KeyboardInterrupt):
        interrupted(signal.SIGHUP, signal.SIGTERM)
    plain = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert interrupted(signal.SIGHUP) is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, plain)


def test_what_a_resumed_start_has_written_stays_though_it_did_no_step(tmp_path: Path):
    assert runs.run(tmp_path / "run", "trainer.max_steps=1") == "completed"
    parts = setup.build_run(runs.small(tmp_path / "run", "trainer.max_steps=2"), BACKEND, 0, 1)
    (tmp_path / "run/warnings.jsonl").write_text("")
    parts.close()
    assert (tmp_path / "run/warnings.jsonl").exists()


WITHOUT = {
    "flock": ("no locks (Function not implemented)", errno.ENOSYS),
    "flock of NFS": ("no locks (No locks available)", errno.ENOLCK),
    "flock of FUSE": ("no locks (Operation not supported)", errno.EOPNOTSUPP),
    "fsync": ("no fsync of folders (Invalid argument)", errno.EINVAL),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_file_system_without_locks_or_fsync_of_folders_is_noted_once_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
):
    said, number = WITHOUT[what]
    name = what.partition(" ")[0]
    module = {"flock": fcntl, "fsync": os}[name]
    plain = getattr(module, name)

    def refused(file, *arguments) -> None:
        if name == "flock" or stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        plain(file, *arguments)

    monkeypatch.setattr(module, name, refused)
    words = ("trainer.max_steps=2", "trainer.save_every=1", "observe.progress=plain")
    assert make_plan(runs.small(tmp_path / "run", *words), BACKEND, 1).problems == ()
    assert runs.run(tmp_path / "run", *words) == "completed"
    assert capsys.readouterr().out.count(f"has {said}") == 1
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").is_file()
    assert read_run(tmp_path / "run").status == "completed"


@pytest.mark.parametrize("name", ["flock", "fsync"])
def test_other_errors_of_a_file_system_are_no_missing_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def broken(*_) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr({"flock": fcntl, "fsync": os}[name], name, broken)
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="Input/output error"):
        file_systems.lock(file) if name == "flock" else file_systems.sync(file)
    if name == "flock":
        with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
            lock_folder(tmp_path / "run")


def test_files_are_copied_where_permissions_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_, **__) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "from/inner").mkdir(parents=True)
    (tmp_path / "from/inner/file").write_text("text")
    for name in ("chmod", "utime"):
        monkeypatch.setattr(os, name, refused)
    file_systems.copy_files(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/inner/file").read_text() == "text"
