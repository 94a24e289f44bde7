"""Size and removal of the files that a program left, whatever it made of them."""

from __future__ import annotations

import os

BLOCK_BYTES = 512


def exceeds(folder: str, most_bytes: int, most_files: int) -> bool:
    """Return whether a folder has more than these bytes or files, while a program may change it."""
    used = files = 0
    folders = [folder]
    for each in folders:
        try:
            with os.scandir(each) as entries:
                for entry in entries:
                    files += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                    if used > most_bytes or files > most_files:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # it is gone meanwhile, or cannot be read
            continue
    return False


def empty_folder(folder: str) -> None:
    """Remove all files in a folder, also below folders that are nested deeper than a path can be long."""
    number = 0
    while names := os.listdir(folder):
        for name in names:
            path = f"{folder}/{name}"
            if not _is_folder(path):
                os.unlink(path)
                continue
            for inner in os.listdir(path):  # flattened: moved up one by one
                _is_folder(f"{path}/{inner}")  # one without permissions could not be moved
                while os.path.lexists(f"{folder}/{number}"):
                    number += 1
                os.rename(f"{path}/{inner}", f"{folder}/{number}")
            os.rmdir(path)


def _is_folder(path: str) -> bool:
    """Return whether a path is a folder, which is made accessible to its owner."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    os.chmod(path, 0o700)
    return True
