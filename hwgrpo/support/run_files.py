"""Files of a run's folder, which a stranger may have made: written through no link, read if they are files and end.

A symbolic link under a name that a run writes would have it write whatever the link names.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from hwgrpo.support.file_systems import sync

MOST_BYTES = 64 << 20
"""Of a file or line that is read at once; those of runs have kilobytes."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file anew, atomically and with fsync; a link under its name is replaced.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        sync(file)
    os.replace(temporary, path)


def open_own(name: str | os.PathLike[str], flags: int) -> int:
    """Open a file that is no link and nothing else but a file; for `open(..., opener=open_own)`.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    return _checked(os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), name)


def open_to_read(path: Path) -> IO[bytes]:
    """Open a file that ends: no pipe, no device.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    return open(_checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK), path), "rb")


def read_whole(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: it is no file, or cannot be opened.
        ValueError: it is too large, or no text in UTF-8.
    """
    with open_to_read(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content.decode("utf-8")


def _checked(descriptor: int, name: str | os.PathLike[str]) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(None, "it is no file but a pipe, a device or a folder", os.fspath(name))
