"""A run's folder: made before the model loads, and held by one run at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from hwgrpo.errors import ConfigError


def claim(folder: Path) -> IO[str]:
    """Make the folder and hold it until the process ends or the returned file is closed.

    Args:
        folder: `trainer.output_dir`.

    Returns:
        The open lock file `.lock`; it names the process that holds it.

    Raises:
        ConfigError: the folder cannot be written, or another run holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (held open as long as the run)
    except OSError as error:
        raise ConfigError(f"trainer.output_dir={str(folder)!r} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"trainer.output_dir={str(folder)!r} is in use by another run (process {holder}); "
            "wait for it, or name another folder"
        ) from None
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
