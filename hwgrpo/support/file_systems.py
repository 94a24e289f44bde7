"""Locks, durable writes and copies, also on file systems that refuse them (Lustre, NFS, CIFS, FUSE)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
"""Errors by which a file system says that it has no such operation; others, such as a full disk, are real."""


def lock(file: int | IO[str] | IO[bytes], *, shared: bool = False, wait: bool = False) -> str | None:
    """Lock an open file or folder until it is closed.

    Args:
        file: an open file, or a descriptor.
        shared: other processes may have a shared lock, too.
        wait: wait for another process's lock.

    Returns:
        Why the file system has no locks; None: the file is locked.

    Raises:
        BlockingIOError: another process has a lock on it.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        return _unsupported(error)
    return None


def sync(file: int | IO[str] | IO[bytes]) -> str | None:
    """Write an open file, or a folder's entries, to the disk; return why the file system cannot, or None."""
    try:
        os.fsync(file if isinstance(file, int) else file.fileno())
    except OSError as error:
        return _unsupported(error)
    return None


def sync_folder(path: Path) -> str | None:
    """Write a folder's entries to the disk; return why the file system cannot, or None."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sync(descriptor)
    finally:
        os.close(descriptor)


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder into another, without permissions and times, which a file system may refuse."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_dir():
            copy_files(file, target / file.name)
        else:
            shutil.copyfile(file, target / file.name)


def _unsupported(error: OSError) -> str:
    if error.errno not in UNSUPPORTED:
        raise error
    return error.strerror or str(error)
