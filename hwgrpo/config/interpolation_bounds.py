"""Bounds on the interpolations of a recipe: ten lines that double each other stand for more than memory holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hwgrpo.config.written_config import Place, dotted, references, texts
from hwgrpo.errors import ConfigError, shown

MOST_INTERPOLATIONS = 2_000
MOST_CHARACTERS = 2**20
"""Characters that all interpolations may become together."""
DEEPEST = 20
"""Interpolations that refer to each other in a chain, or are nested."""
MOST_NAMED = 8
"""Interpolations that are a part of another's name, of which it is not known what they refer to."""
_NAMED = re.compile(r"\$\{\s*[\w.\[\]]*\$\{")


def check_interpolations(found: Mapping[Place, str], tree: Any) -> None:
    """Check that interpolations are few, and what they become is short.

    Args:
        found: place -> text with an interpolation, as it was written.
        tree: all settings, unresolved, as plain containers.

    Raises:
        ConfigError: there are too many, or they become too long; it names a setting.
    """
    total = named = 0
    for place, text in found.items():
        total, named = total + text.count("${"), named + len(_NAMED.findall(text))
        if total > MOST_INTERPOLATIONS or named > MOST_NAMED or _depth(text) > DEEPEST:
            raise _error(place, text)
    sizes = _Sizes(found, tree)
    left = MOST_CHARACTERS
    for place, text in found.items():
        left -= sizes.of(place)
        if left < 0:
            raise _error(place, text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for each in re.finditer(r"\$\{|\}", text):
        depth = max(0, depth - 1) if each[0] == "}" else depth + 1
        deepest = max(deepest, depth)
    return deepest


def _error(place: Place, text: str) -> ConfigError:
    return ConfigError(
        f"{dotted(place)}={shown(text)}: interpolations refer to each other so often or so deep that they would become "
        f"more than {MOST_CHARACTERS} characters or {DEEPEST} levels; write the value itself"
    )


class _Sizes:
    """How many characters interpolations become, each computed once."""

    def __init__(self, found: Mapping[Place, str], tree: Any) -> None:
        self._found = found
        self._known: dict[Place, int] = {}
        self._literal: dict[Place, int] = {}
        self._below: dict[Place, list[Place]] = {}
        for place, text in texts(tree):
            for size in range(1, len(place) + 1):
                self._literal[place[:size]] = self._literal.get(place[:size], 0) + len(text) + 1
        for place in found:
            for size in range(1, len(place) + 1):
                self._below.setdefault(place[:size], []).append(place)

    def of(self, place: Place, depth: int = 0) -> int:
        """Return the size of a text with interpolations; one that refers to itself is refused elsewhere.

        Raises:
            ConfigError: the chain of references is too long.
        """
        if place in self._known:
            return self._known[place]
        text = self._found[place]
        if depth > DEEPEST:
            raise _error(place, text)
        self._known[place] = 0
        size = len(text)
        for target in references(text, place):
            size += self._literal.get(target, 1)
            for each in self._reached(target):
                size += self.of(each, depth + 1)
                if size > MOST_CHARACTERS:
                    raise _error(place, text)
        self._known[place] = size
        return size

    def _reached(self, target: Place) -> Iterable[Place]:
        """Return the interpolations in what a reference names, or that it is within."""
        above = (target[:size] for size in range(1, len(target)))
        return [*self._below.get(target, ()), *(place for place in above if place in self._found)]
