"""The command that a run script starts: its arguments, with marks where a piece of one is not known or a variable's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MARK = re.compile("\ud800([0-9]{1,9})\ud801")
"""An unknown piece of a text: the place of its reason. Halves of characters are in no text that was read."""
KEPT = re.compile("\ud802([0-9]{1,9})\ud803")
"""The value of a variable of the environment: its place among those that are kept."""


@dataclass(frozen=True)
class KeptVariable:
    """A variable of the caller's environment, which a script may not write anywhere."""

    name: str
    value: str
    is_secret: bool
    """Whether nothing may be made of it, as its first half: that would not be an interpolation."""


@dataclass
class VerlCommand:
    """The arguments of a verl program."""

    marked: list[str]
    """`key=value` each; unknown pieces and values of variables are marks."""
    config_name: str | None = None
    config_path: str | None = None
    notices: list[str] = field(default_factory=list)
    """What was left out, and what bash would do otherwise."""
    unknown: list[str] = field(default_factory=list)
    """The reason of each mark."""
    unset: dict[int, str] = field(default_factory=dict)
    """The place of a mark -> the variable that is not set."""
    kept: list[KeptVariable] = field(default_factory=list)
    """The variable of each mark of one."""

    @property
    def arguments(self) -> list[str]:
        """The arguments as the program gets them, with the values of variables: not to be printed."""
        return [*map(self.in_bash, self.marked)]

    def reasons(self, text: str) -> list[str]:
        """Return why pieces of a text are unknown; an empty list where all is known."""
        places = [int(found[1]) for found in MARK.finditer(text)]
        return [self.unknown[place] for place in places if place < len(self.unknown)]

    def written(self, text: str) -> str:
        """Return a text with variables as interpolations, `${oc.env:NAME}`."""
        return KEPT.sub(lambda found: f"${{oc.env:{self.kept[int(found[1])].name}}}", text)

    def named(self, text: str) -> str:
        """Return a text for a message, with variables by their names, and dots for what is unknown."""
        return MARK.sub("...", KEPT.sub(lambda found: f"${self.kept[int(found[1])].name}", text))

    def in_bash(self, text: str) -> str:
        """Return a text as the program gets it."""
        return KEPT.sub(lambda found: self.kept[int(found[1])].value, text)

    def is_unset(self, texts: Iterable[str]) -> bool:
        """Return whether all unknown pieces of texts are variables that are not set."""
        return all(int(found[1]) in self.unset for text in texts for found in MARK.finditer(text))

    def with_unset(self, value: Any) -> Any:
        """Return a value whose pieces that are variables which are not set are interpolations."""
        if isinstance(value, list):
            return [self.with_unset(each) for each in value]
        if not isinstance(value, str):
            return value
        return MARK.sub(lambda found: f"${{oc.env:{self.unset[int(found[1])]}}}", value)

    def has_secret(self, text: str) -> bool:
        """Return whether a text has the value of a variable that may be secret."""
        return any(each.is_secret for each in self.kept_in(text))

    def kept_in(self, text: str) -> list[KeptVariable]:
        """Return the variables whose values a text has."""
        return [self.kept[int(found[1])] for found in KEPT.finditer(text)]


def without_marks(text: str) -> str:
    """Return a text without its unknown pieces, and what joined them."""
    return re.sub("[-_./]*" + MARK.pattern + "[-_.]*", "", text)
