"""The cache of models that are made or converted on this machine: `$HWGRPO_CACHE`, else `~/.cache/hwgrpo`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hwgrpo.errors import ConfigError
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.scratch import ScratchFolder, remove_stale

UNFINISHED = ".making-"
"""Prefix of the names of folders with models that are being made."""


def cache_root(kind: str) -> Path:
    """Return the folder of the cached models of a kind, e.g. "builtin"; it may not exist."""
    return Path(os.environ.get("HWGRPO_CACHE") or "~/.cache/hwgrpo").expanduser() / kind


def prepare_root(root: Path, content: str) -> None:
    """Make a folder of `cache_root`, and remove what processes that were killed have left in it.

    Args:
        root: the folder.
        content: what is kept there, in the plural, for messages.

    Raises:
        ConfigError: it cannot be made.
    """
    remove_stale(UNFINISHED, root)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be made ({error.strerror}), where {content} are kept; "
            "set HWGRPO_CACHE to a folder that can be written"
        ) from error


@contextmanager
def unfinished_folder(root: Path) -> Iterator[Path]:
    """Yield an empty folder in `root`, which is removed at the end of the block unless it was renamed."""
    scratch = ScratchFolder(UNFINISHED, root)
    try:
        yield scratch.path
    finally:
        scratch.remove()


def publish(unfinished: Path, folder: Path) -> None:
    """Give a complete folder its final name, unless another process was first: its model is the same."""
    follow_umask(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # any other reason is an error
            raise
