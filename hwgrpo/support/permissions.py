"""Permissions of files and folders: of those that a library made for this user alone, and of those that are run."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
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


def why_untrusted(program: Path, *paths: Path) -> str | None:
    """Return why another user may have written what is below `paths`, or None.

    Trusted are root, this user, and who owns this program or its interpreter: their code runs in any case.

    Args:
        program: folder of this program.
        paths: folders and files; links are judged by themselves and by where they lead.
    """
    trusted = {0, os.geteuid(), _owner(program), _owner(Path(sys.executable).resolve())}
    for path in paths:
        for each in (path, path.resolve()):
            if (owner := _owner(each)) not in trusted:
                return f"{each} belongs to {_user(owner)}, neither to you nor to root"
            if each.is_dir() and each.stat().st_mode & 0o002:
                return f"every user may write to {each}"
    return None


def _owner(path: Path) -> int:
    return path.lstat().st_uid


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
