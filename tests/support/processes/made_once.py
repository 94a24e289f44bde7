"""Folders that are made once, however many processes want them."""

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, made elsewhere first and put in its place at once; who comes meanwhile waits for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                made = Path(scratch) / "made"
                make(made)
                made.rename(folder)
    return folder
