"""What processes that were killed have left, and the permissions of what is saved."""

import os
import signal
from pathlib import Path

import pytest
import torch

from hwgrpo.models.builtin import resolve
from hwgrpo.rollout.server import weight_transfer
from hwgrpo.rollout.server.server_owner import new_owner
from hwgrpo.support import file_systems, scratch
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.scratch import ScratchFolder, remove_stale
from tests.support.models.tiny import tiny_qwen3
from tests.support.runs import runs
from tests.support.runs.saving import policy_of, saved, trained


def left_by_a_killed_process(root: Path) -> Path:
    """Return the scratch folder, with a file in it, of a process that has been killed."""

    def killed() -> None:
        folder = ScratchFolder("mine-", root)
        (folder.path / "weights").write_text("large")
        os.kill(os.getpid(), signal.SIGKILL)

    assert runs.forked(killed) == -signal.SIGKILL
    (left,) = root.iterdir()
    assert (left / "weights").exists()
    return left


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_of_a_living_one(tmp_path: Path):
    left = left_by_a_killed_process(tmp_path)
    own = ScratchFolder("mine-", tmp_path)
    assert not left.exists()
    assert remove_stale("mine-", tmp_path) == []
    assert runs.forked(lambda: remove_stale("mine-", tmp_path)) == 0
    assert own.path.is_dir()
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_other_users_other_hosts_and_earlier_versions_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = left_by_a_killed_process(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    (tmp_path / f"{left.name}-link").symlink_to(elsewhere)
    (tmp_path / f"{left.name}-file").write_text("")
    (tmp_path / "mine-abcd1234").mkdir()
    before = {*tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert remove_stale("mine-", tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(scratch, "_prefix_here", lambda prefix: f"{prefix}otherone-")
        assert remove_stale("mine-", tmp_path) == []
    assert {*tmp_path.iterdir()} == before
    assert remove_stale("mine-", tmp_path) == [left]
    assert {*tmp_path.iterdir()} == before - {left}
    assert (elsewhere / "precious").exists()


def test_a_folder_that_another_start_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, seen = os.open, []

    def removed_first(path, *arguments, **named):
        if not seen:
            seen.append(path)
            os.rmdir(path)
        return plain(path, *arguments, **named)

    monkeypatch.setattr(os, "open", removed_first)
    own = ScratchFolder("mine-", tmp_path)
    assert own.path.is_dir()
    assert own.path not in seen
    own.remove()


def test_where_folders_cannot_be_locked_none_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    left = left_by_a_killed_process(tmp_path)
    monkeypatch.setattr(file_systems.fcntl, "flock", no_locks)
    ScratchFolder("mine-", tmp_path).remove()
    assert left.is_dir()


def test_weights_that_a_killed_run_left_in_memory_are_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hwgrpo.rollout.vllm.vllm_settings.MEMORY", str(tmp_path))

    def killed() -> None:
        held = weight_transfer.FolderTransfer(
            None, torch.float32, new_owner(None, "run", take_over=False), lambda *_: None
        )
        assert held.description == "a folder"
        os.kill(os.getpid(), signal.SIGKILL)

    assert runs.forked(killed) == -signal.SIGKILL
    assert [path.name.startswith("hwgrpo-weights-") for path in tmp_path.iterdir()] == [True]
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.max_steps=1")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_a_killed_process_left_half_made_is_removed_and_a_made_one_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))
    root = tmp_path / "builtin"
    root.mkdir()

    def killed() -> None:
        held = ScratchFolder(".making-", root)
        assert held.path.is_dir()
        os.kill(os.getpid(), signal.SIGKILL)

    assert runs.forked(killed) == -signal.SIGKILL
    assert len(list(root.iterdir())) == 1
    folder = resolve("builtin://tiny?task=sort&digits=3&hidden=32&layers=1&steps=1&batch=2")
    assert list(root.iterdir()) == [folder]
    assert modes(folder) == {0o755, 0o644}
    assert runs.forked(killed) == -signal.SIGKILL
    resolve("builtin://tiny?task=sort&digits=3&hidden=32&layers=1&steps=1&batch=2")
    assert list(root.iterdir()) == [folder], "also where there is nothing to make"


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize(("umask", "expected"), [(0o022, {0o755, 0o644}), (0o007, {0o770, 0o660})])
def test_checkpoints_and_final_models_follow_the_umask(tmp_path: Path, umask: int, expected: set[int]):
    def body() -> None:
        os.umask(umask)
        saved(tmp_path / "checkpoints", trained(policy_of(tiny_qwen3())))
        runs.run(tmp_path / "run", "trainer.max_steps=1", "model.lora.rank=2")
        assert os.umask(0) == umask, "it is as it was"

    assert runs.forked(body) == 0
    for folder in ("checkpoints", "run/checkpoints", "run/final", "run/final-adapter"):
        assert modes(tmp_path / folder) == expected, folder


def test_a_file_alone_follows_the_umask(tmp_path: Path):
    path = tmp_path / "file"
    path.touch(0o600)
    follow_umask(path)
    os.umask(umask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
