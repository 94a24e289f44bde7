"""What distributions offer by entry points, read so that one whose list is damaged hides nothing but itself."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from hwgrpo_backends.distributions import installed, normalized

VALUE = re.compile(r"(?P<module>[\w.]+)\s*(:\s*(?P<attribute>[\w.]+))?\s*(\[.*\])?")
"""`module:attribute [extras]`; extras are obsolete and mean nothing."""


class EntryPoint(NamedTuple):
    """A name under which a distribution offers an object."""

    group: str
    name: str
    value: str
    owner: str
    """The distribution's name."""

    def load(self) -> Any:
        """Import the module and return the object.

        Raises:
            ValueError: the value names none.
        """
        found = VALUE.fullmatch(self.value)
        if found is None:
            raise ValueError(f"{self.value!r} is no module:attribute")
        module = importlib.import_module(found["module"])
        return reduce(getattr, found["attribute"].split(".") if found["attribute"] else (), module)


class Found(NamedTuple):
    """Entry points of the requested groups, and distributions whose entry points are unreadable."""

    entries: tuple[EntryPoint, ...]
    unreadable: tuple[str, ...]


def find(path: Sequence[str], groups: Collection[str]) -> Found:
    """Return the entry points of `groups` that the distributions on `path` have.

    Args:
        path: folders, as in `sys.path`; of a distribution that is there twice, the first counts.
        groups: names of groups.
    """
    entries: list[EntryPoint] = []
    unreadable: set[str] = set()
    seen: set[str] = set()
    for distribution in installed(path):
        try:
            text = distribution.read_text("entry_points.txt")
            offered = None if text is None else tuple(_parsed(text))
        except ValueError:
            unreadable.add(distribution.name)
            continue
        if not offered or not any(group in groups for group, *_ in offered):
            continue
        name = distribution.name
        if normalized(name) not in seen:
            seen.add(normalized(name))
            entries += (EntryPoint(*each, name) for each in offered if each[0] in groups)
    return Found(tuple(entries), tuple(sorted(unreadable)))


def _parsed(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, value); a line of a group that is no `name = value` is a ValueError."""
    group = None
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group is not None:
            name, separator, value = map(str.strip, line.partition("="))
            if not (name and separator):
                raise ValueError(line)
            yield group, name, value
