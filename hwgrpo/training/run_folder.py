"""A run's folder: made before the model loads, held by one run at a time, and taken back where nothing came of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.strategies.strategy import Strategy

LOCK = ".lock"
RUN_ID = "run-id.txt"
"""File with a random id, which stays when the run is resumed."""
RUN_ID_BYTES = 8
START_FILES = (
    RUN_ID,
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "completions.jsonl",
    "warnings.jsonl",
    *("tensorboard", "code"),
    *("wandb", "wandb.json", "trackio.json", "swanlog", "swanlab.json"),
)
"""What a run may have written before its first step is done."""
FOLDERS = ("checkpoints", "final", "final-adapter", "tensorboard", "code")
FILES = (*(name for name in START_FILES if "." in name), "kernels.json", "summary.json", "micro_batch.json")
"""What a run writes; a file in the place of a folder would only be seen when it is written, after hours."""


class FolderLock:
    """A run's folder, held until it is closed or the process ends.

    Args:
        folder: the folder.
        lock: its locked file.
        made: files and folders that this start made to hold it, the innermost first.
    """

    def __init__(self, folder: Path, lock: IO[str], made: Iterable[Path]) -> None:
        self._folder, self._lock, self._made = folder, lock, tuple(made)
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # known by it, whatever its name becomes
        weakref.finalize(self, os.close, self._held)
        self._unused = True
        self._found = frozenset(os.listdir(folder))
        self.run_id = _run_id(folder / RUN_ID)
        """The run's random id: a start that resumes it has the same."""

    def keep(self) -> None:
        """Leave everything where it is from now on: a step has been done, or the run resumes from a checkpoint."""
        self._unused = False

    def moved(self) -> str | None:
        """Return what became of the folder where it is no longer at its path, for an error; None while it is."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._held), self._folder.stat()):
                return None
        now = None
        with contextlib.suppress(OSError):  # a system that does not say
            now = os.readlink(f"/proc/self/fd/{self._held}")
        if now == os.path.realpath(self._folder):
            return None  # a network disk that has numbered it anew
        begun = f"trainer.output_dir={str(self._folder)!r}"
        if now is None or now.endswith(" (deleted)"):
            return f"{begun} was removed or moved while the run went on; put it back and start again"
        return (
            f"{begun} was moved to {now!r} while the run went on; move it back or set trainer.output_dir={now}, and "
            "start again: the run resumes from its newest checkpoint there"
        )

    def close(self) -> None:
        """Let go of the folder; unless it is kept, nothing stays of what was written. Close its logs first.

        What was there before stays, and so does what a run does not write.
        """
        if self._unused:
            self._unused = False
            self._take_back()
        self._lock.close()

    def _take_back(self) -> None:
        for name in START_FILES:
            path = self._folder / name
            if name in self._found:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        # What cannot be removed must not hide why the run failed; a folder with something in it stays, too.
        with contextlib.suppress(OSError):
            for path in self._made:
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


def lock_folder_on_rank_0(folder: Path, strategy: Strategy) -> FolderLock | None:
    """Hold the run's folder on rank 0, as `lock_folder` does; every rank calls this, before it looks into the folder.

    Returns:
        The lock; None on ranks other than the first.

    Raises:
        ConfigError: as `lock_folder`, on all ranks.
    """
    held, refusal = None, None
    if strategy.rank == 0:
        try:
            held = lock_folder(folder)
        except ConfigError as error:
            refusal = str(error)
    refusal = strategy.gather_objects(refusal)[0]
    if refusal is not None:
        raise ConfigError(refusal)
    return held


def raise_if_moved(held: FolderLock | None, strategy: Strategy) -> None:
    """Raise on all ranks where rank 0 finds the run's folder gone from its path; every rank calls this.

    Args:
        held: the lock; None on ranks other than the first.
        strategy: joins the ranks.

    Raises:
        RunError: naming the folder, and where it is now if that can be found out.
    """
    moved = strategy.gather_objects(held.moved() if held is not None else None)[0]
    if moved is not None:
        raise RunError(moved)


def lock_folder(folder: Path) -> FolderLock:
    """Make the folder and hold it until the process ends or what is returned is closed.

    Args:
        folder: `trainer.output_dir`.

    Returns:
        The lock; the lock file `.lock` names the process that holds it.

    Raises:
        ConfigError: the folder cannot be written, holds a file where a run makes a folder or the other way round, or
            another run holds it.
    """
    _check_places(folder)
    path = folder / LOCK
    while True:
        made = [each for each in (path, *path.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (held open as long as the run)
        except OSError as error:
            raise ConfigError(_cannot_be_written(folder, error.strerror)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            lock.close()
            raise ConfigError(_in_use(folder, holder)) from None
        if _is(lock, path):
            break
        lock.close()  # a start that failed took its lock file away between our opening and locking it
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return FolderLock(folder, lock, made)


def _check_places(folder: Path) -> None:
    places = [(folder / name, "a folder", Path.is_dir) for name in FOLDERS]
    places += [(folder / name, "a file", Path.is_file) for name in FILES]
    for path, kind, is_kind in places:
        if os.path.lexists(path) and not is_kind(path):
            raise ConfigError(
                f"trainer.output_dir={str(folder)!r}: the run writes {kind} {path.name}, and something else is in its "
                f"place: move {path} away"
            )


def reason_against_folder(folder: Path) -> str | None:
    """Return why `lock_folder` could not make or hold a folder now, or None; nothing is made."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not nearest.is_dir():
        return _cannot_be_written(folder, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return _cannot_be_written(folder, os.strerror(errno.EACCES))
    if not (folder / LOCK).exists():
        return None
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _in_use(folder, lock.read())
    except OSError as error:
        return _cannot_be_written(folder, error.strerror)
    return None


def _cannot_be_written(folder: Path, why: str | None) -> str:
    return f"trainer.output_dir={str(folder)!r} cannot be written: {why}"


def _in_use(folder: Path, holder: str) -> str:
    return (
        f"trainer.output_dir={str(folder)!r} is in use by another run (process {holder.strip() or 'unknown'}); "
        "wait for it, or name another folder"
    )


def _run_id(path: Path) -> str:
    """Return the id in a file, which is written where it is missing or broken off."""
    found = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    if len(found) != 2 * RUN_ID_BYTES or not found.isalnum():
        found = secrets.token_hex(RUN_ID_BYTES)
        path.write_text(found + "\n", encoding="utf-8")
    return found


def _is(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that lies at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
