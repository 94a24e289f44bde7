"""What distributions offer by entry points, read so that one whose list is damaged hides nothing but itself.

`importlib.metadata.entry_points` fails on the first list that it cannot read, whoever asks and whatever for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Entry points of the groups that were asked for, and distributions of which they could not be read."""

    entries: tuple[importlib.metadata.EntryPoint, ...]
    unreadable: tuple[str, ...]


def find(path: Sequence[str], groups: Collection[str]) -> Found:
    """Return the entry points of `groups` that the distributions on `path` have.

    Args:
        path: folders, as in `sys.path`; of a distribution that is there twice, the first counts.
        groups: names of groups.
    """
    entries: list[importlib.metadata.EntryPoint] = []
    unreadable: set[str] = set()
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions(path=list(path)):
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except UnicodeDecodeError:
            text = None
        if text is None or _is_damaged(text):
            unreadable.add(distribution.name or "unknown distribution")
        elif any(group in text for group in groups) and distribution.name not in seen:  # parsing every one takes longer
            seen.add(distribution.name)
            entries += (entry for entry in distribution.entry_points if entry.group in groups)
    return Found(tuple(entries), tuple(sorted(unreadable)))


def owner(entry: importlib.metadata.EntryPoint) -> str:
    """Return the name of the distribution that an entry point is of."""
    return entry.dist.name if entry.dist else "unknown distribution"


def _is_damaged(text: str) -> bool:
    """Tell whether a section has a line that is no `name = value`, on which the standard library fails."""
    lines = (line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    in_section = False
    for line in lines:
        is_title = line.startswith("[") and line.endswith("]")
        if in_section and not is_title and "=" not in line:
            return True
        in_section = in_section or is_title
    return False
