"""Folders that are made once, however many processes want them."""

import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, made elsewhere first and put in its place at once, so that nobody meets half of it."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
    return folder
