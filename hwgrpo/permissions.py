"""Permissions of files and folders that a library made for this user alone."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_LOCK = threading.Lock()


def follow_umask(path: Path) -> None:
    """Give a file, or a folder and all in it, the permissions that the umask gives to new ones.

    Files of safetensors and tempfile are readable by their owner alone.
    """
    umask = _umask()
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):  # a file system without permissions
            each.chmod((0o777 if each.is_dir() else 0o666) & ~umask)


def _umask() -> int:
    with _LOCK:  # it can only be read by setting it; what another thread makes meanwhile is made private
        umask = os.umask(0o077)
        os.umask(umask)
    return umask
