"""Folders that end with the process that made them; the next start removes those of processes that were killed.

A running process holds a lock on its folder. The kernel releases it when the process ends, for whatever reason,
and shows it to other pid namespaces (containers that share /dev/shm), where a process's number means nothing. Locks of
other hosts may be invisible on a shared disk, so names carry the id of the running kernel and only its own are removed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import weakref
from pathlib import Path

from hwgrpo.support.file_systems import lock as lock_file


class ScratchFolder:
    """An empty folder of this process, removed with this object, at the end of the process, or by a later start.

    Args:
        prefix: of its name, e.g. "hwgrpo-weights-".
        root: folder to make it in; None: the system's for temporary files.
    """

    def __init__(self, prefix: str, root: str | Path | None = None) -> None:
        remove_stale(prefix, root)
        while True:
            self._folder = tempfile.TemporaryDirectory(prefix=_prefix_here(prefix), dir=root)
            self.path = Path(self._folder.name)
            with contextlib.suppress(FileNotFoundError):  # another start removed it before it was locked
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                weakref.finalize(self, os.close, lock)
                with contextlib.suppress(OSError):  # NFS locks no folders
                    lock_file(lock, wait=True)  # without locks, no other start removes it either
                if os.path.samestat(os.fstat(lock), self.path.stat()):
                    return
            self._folder.cleanup()

    def remove(self) -> None:
        """Remove the folder, unless it was renamed."""
        self._folder.cleanup()


def remove_stale(prefix: str, root: str | Path | None = None) -> list[Path]:
    """Remove this user's scratch folders whose processes have ended; return them.

    Args:
        prefix: of their names.
        root: as in `ScratchFolder`.
    """
    removed = []
    for path in Path(root or tempfile.gettempdir()).glob(f"{_prefix_here(prefix)}*"):
        with contextlib.suppress(OSError):  # it is locked, somebody else's, a file, or gone meanwhile
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if lock_file(lock) is None:
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed


def _prefix_here(prefix: str) -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        kernel = platform.node()
    return f"{prefix}{kernel[:8]}-"
