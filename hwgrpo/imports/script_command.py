"""The command that a run script starts: its arguments, with marks where a piece of one is not known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MARK = re.compile("\ue000(\\d+)\ue001")
"""An unknown piece of a text: the place of its reason."""


@dataclass
class VerlCommand:
    """The arguments of a verl program."""

    arguments: list[str]
    """`key=value` each, as the program gets them; unknown pieces are marks."""
    config_name: str | None = None
    config_path: str | None = None
    notices: list[str] = field(default_factory=list)
    """What was left out, and what bash would do otherwise."""
    unknown: list[str] = field(default_factory=list)
    """The reason of each mark."""

    def reasons(self, text: str) -> list[str]:
        """Return why pieces of a text are unknown; an empty list where all is known."""
        return [self.unknown[int(found[1])] for found in MARK.finditer(text)]


def without_marks(text: str) -> str:
    """Return a text without its unknown pieces, and what joined them."""
    return re.sub("[-_./]*" + MARK.pattern + "[-_.]*", "", text)
