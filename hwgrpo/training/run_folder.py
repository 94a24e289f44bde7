"""A run's folder: made before the model loads, locked by one run, and removed again if no step was finished."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.support.file_systems import lock as lock_file
from hwgrpo.support.file_systems import sync_folder
from hwgrpo.support.run_files import open_own, open_to_read, write_whole
from hwgrpo.training.strategies.strategy import Strategy

LOCK = ".lock"
RUN_ID = "run-id.txt"
"""File with a random id, unchanged when the run is resumed."""
RUN_ID_BYTES = 8
START_FILES = (
    RUN_ID,
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "completions.jsonl",
    "warnings.jsonl",
    *("tensorboard", "code", "images"),
    *("wandb", "wandb.json", "trackio.json", "swanlog", "swanlab.json"),
)
"""Files and folders that a run may write before its first step is finished."""
MODELS = ("final", "final-adapter")
"""Folders that are replaced at the end of a run."""
FOLDERS = ("checkpoints", "tensorboard", "code", "images")
FILES = (*(name for name in START_FILES if "." in name), "kernels.json", "summary.json", "micro_batch.json")
"""Folders and files that a run writes; checked at the start, since a conflict would otherwise appear after hours."""


class FolderLock:
    """The lock on a run's folder, held until it is closed or the process ends.

    Args:
        folder: the folder.
        lock: its locked file.
        made: files and folders made by this start, the innermost first.
        note: what the folder's file system lacks; None: nothing.
    """

    def __init__(self, folder: Path, lock: IO[str], made: Iterable[Path], note: str | None = None) -> None:
        self.note = note
        """What the folder's file system lacks, for the user; None: nothing."""
        self._folder, self._lock, self._made = folder, lock, tuple(made)
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # finds the folder after a rename
        weakref.finalize(self, os.close, self._descriptor)
        self._unused = True
        self._existing = frozenset(os.listdir(folder))
        self.run_id = _run_id(folder / RUN_ID)
        """The run's random id, the same when the run is resumed."""

    def keep(self) -> None:
        """Keep all files on close: a step is finished, or the run resumes from a checkpoint."""
        self._unused = False

    def moved(self) -> str | None:
        """Return an error if the folder was removed or moved, with its new path; None if it was not."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), self._folder.stat()):
                return None
        now = None
        with contextlib.suppress(OSError):  # a system without /proc
            now = os.readlink(f"/proc/self/fd/{self._descriptor}")
        if now == os.path.realpath(self._folder):
            return None  # a network file system that changed its inode number
        setting = f"trainer.output_dir={str(self._folder)!r}"
        if now is None or now.endswith(" (deleted)"):
            return f"{setting} was removed or moved during the run; restore it and start again"
        return (
            f"{setting} was moved to {now!r} during the run; move it back or set trainer.output_dir={now}, and "
            "start again: the run resumes from its newest checkpoint there"
        )

    def close(self) -> None:
        """Unlock the folder; unless `keep` was called, remove the files that this start wrote. Close its logs first.

        Files that existed before, and files that a run does not write, stay.
        """
        if self._unused:
            self._unused = False
            self._remove_start_files()
        self._lock.close()

    def _remove_start_files(self) -> None:
        for name in START_FILES:
            path = self._folder / name
            if name in self._existing:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        # A failed removal must not hide why the run failed; a folder that is not empty stays, too.
        with contextlib.suppress(OSError):
            for path in self._made:
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


def lock_folder_on_rank_0(folder: Path, strategy: Strategy, models: Iterable[str] = ()) -> FolderLock | None:
    """Lock the run's folder on rank 0; every rank calls this before reading the folder.

    Args:
        folder, models: as for `lock_folder`.
        strategy: connects the ranks.

    Returns:
        The lock; None on ranks other than rank 0.

    Raises:
        ConfigError: as `lock_folder`, on all ranks.
    """
    lock, problem = None, None
    if strategy.rank == 0:
        try:
            lock = lock_folder(folder, models)
        except ConfigError as error:
            problem = str(error)
    problem = strategy.gather_objects(problem)[0]
    if problem is not None:
        raise ConfigError(problem)
    return lock


def raise_if_moved(lock: FolderLock | None, strategy: Strategy) -> None:
    """Raise on all ranks if the run's folder was removed or moved; every rank calls this.

    Args:
        lock: the folder's lock; None on ranks other than rank 0.
        strategy: connects the ranks.

    Raises:
        RunError: with the folder's path, and its new path if known.
    """
    moved = strategy.gather_objects(lock.moved() if lock is not None else None)[0]
    if moved is not None:
        raise RunError(moved)


def lock_folder(folder: Path, models: Iterable[str] = ()) -> FolderLock:
    """Make the folder and lock it until the process ends or the lock is closed.

    Args:
        folder: `trainer.output_dir`.
        models: names of the folders of models that the run writes at its end, besides `MODELS`.

    Returns:
        The lock; the lock file `.lock` names the process that holds it.

    Raises:
        ConfigError: the folder cannot be written, has a file where a run makes a folder or the other way round, or is
            locked by another run.
    """
    if (problem := _wrong_place(folder, models)) is not None:
        raise ConfigError(problem)
    path = folder / LOCK
    while True:
        made = [each for each in (path, *path.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(path, "a+", encoding="utf-8", opener=open_own)  # noqa: SIM115  (open as long as the run)
        except OSError as error:
            raise ConfigError(_cannot_be_written(folder, error.strerror)) from error
        try:
            without_locks = lock_file(lock)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise ConfigError(_in_use(folder, holder)) from None
        except OSError as error:
            lock.close()
            raise ConfigError(_cannot_be_written(folder, error.strerror)) from error
        if _is(lock, path):
            break
        lock.close()  # a failed start removed its lock file between our open and our lock
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    try:
        note = _missing_operations(folder, without_locks)
    except OSError as error:
        lock.close()
        raise ConfigError(_cannot_be_written(folder, error.strerror)) from error
    return FolderLock(folder, lock, made, note)


def _missing_operations(folder: Path, without_locks: str | None) -> str | None:
    """Return a note on what a folder's file system lacks, or None; runs go on without."""
    without_sync = sync_folder(folder)
    lacks = [
        *([f"no locks ({without_locks}): do not start a second run in this folder"] if without_locks else []),
        *([f"no fsync of folders ({without_sync}): a crash of the host may lose a checkpoint"] if without_sync else []),
    ]
    return f"the file system of {folder} has {' and '.join(lacks)}" if lacks else None


def _wrong_place(folder: Path, models: Iterable[str]) -> str | None:
    """Return what is in the way of a file or folder that a run writes, or None."""
    models = (*MODELS, *models)
    places = [(folder / name, "a folder", Path.is_dir) for name in (*FOLDERS, *models)]
    places += [(folder / name, "a file", _is_own_file) for name in FILES]
    for path, kind, is_kind in places:
        setting = f"trainer.output_dir={str(folder)!r}"
        if os.path.lexists(path) and not is_kind(path):
            found = "a symbolic link" if path.is_symlink() else f"not {kind}"
            return f"{setting}: the run writes {kind} {path.name}, but {path} is {found}: move {path} away"
    return None


def reason_against_links(folder: Path, models: Iterable[str] = ()) -> str | None:
    """Return an error if a folder of models that the run replaces at its end is a symbolic link; None if none is.

    Args:
        folder, models: as for `lock_folder`.
    """
    for path in (folder / name for name in (*MODELS, *models)):
        if path.is_symlink():
            return (
                f"trainer.output_dir={str(folder)!r}: {path} is a symbolic link, and the run replaces this folder: "
                "remove the link, or set trainer.output_dir to a folder on that disk"
            )
    return None


def _is_own_file(path: Path) -> bool:
    """Return whether a path is a file, and no link by which a run would write another one."""
    return path.is_file() and not path.is_symlink()


def reason_against_folder(folder: Path, models: Iterable[str] = ()) -> str | None:
    """Return why `lock_folder` would fail now, or None; nothing stays."""
    if (problem := _wrong_place(folder, models)) is not None:
        return problem
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        return _cannot_be_written(folder, os.strerror(errno.ENOTDIR))
    try:
        with tempfile.TemporaryFile(dir=nearest):  # access rights say nothing of root, /proc and some network drives
            pass
    except OSError as error:
        return _cannot_be_written(folder, error.strerror)
    if not (folder / LOCK).exists():
        return None
    try:
        with open_to_read(folder / LOCK) as lock:
            try:
                lock_file(lock, shared=True)
            except BlockingIOError:
                return _in_use(folder, lock.read(100).decode("utf-8", "replace"))
    except OSError as error:
        return _cannot_be_written(folder, error.strerror)
    return None


def _cannot_be_written(folder: Path, reason: str | None) -> str:
    return f"trainer.output_dir={str(folder)!r} cannot be written: {reason}"


def _in_use(folder: Path, holder: str) -> str:
    return (
        f"trainer.output_dir={str(folder)!r} is in use by another run (process {holder.strip() or 'unknown'}); "
        "wait for it, or set another folder"
    )


def _run_id(path: Path) -> str:
    """Return the id in a file; write a new one if it is missing or incomplete."""
    run_id = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    if len(run_id) != 2 * RUN_ID_BYTES or not run_id.isalnum():
        run_id = secrets.token_hex(RUN_ID_BYTES)
        write_whole(path, run_id + "\n")
    return run_id


def _is(file: IO[str], path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
