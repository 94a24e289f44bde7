"""A run's folder: made before the model loads, held by one run at a time, and taken back where nothing came of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hwgrpo.errors import ConfigError

LOCK = ".lock"
START_FILES = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "completions.jsonl",
    "warnings.jsonl",
    "tensorboard",
    *("wandb", "wandb.json", "trackio.json", "swanlog", "swanlab.json"),
)
"""What a run may have written before its first step is done."""


class Claim:
    """A run's folder, held until it is closed or the process ends.

    Args:
        folder: the folder.
        lock: its locked file.
        made: files and folders that this start made to hold it, the innermost first.
        fresh: whether this start begins a run, instead of going on with one.
    """

    def __init__(self, folder: Path, lock: IO[str], made: Iterable[Path], *, fresh: bool) -> None:
        self._folder, self._lock, self._made = folder, lock, tuple(made)
        self._unused = fresh
        self._found = frozenset(os.listdir(folder))

    def keep(self) -> None:
        """Leave everything where it is from now on: a step has been done."""
        self._unused = False

    def close(self) -> None:
        """Let go of the folder; a fresh run that did no step leaves nothing of what it wrote. Close its logs first.

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


def claim(folder: Path, *, fresh: bool) -> Claim:
    """Make the folder and hold it until the process ends or what is returned is closed.

    Args:
        folder: `trainer.output_dir`.
        fresh: whether a run begins, instead of going on from a checkpoint.

    Returns:
        The claim; the lock file `.lock` names the process that holds it.

    Raises:
        ConfigError: the folder cannot be written, or another run holds it.
    """
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
    return Claim(folder, lock, made, fresh=fresh)


def reason_against_claim(folder: Path) -> str | None:
    """Return why `claim` could not make or hold a folder now, or None; nothing is made."""
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


def _is(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that lies at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
