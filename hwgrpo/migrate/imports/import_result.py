"""The result of an import: every key of the other project with what became of it, and the recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hwgrpo.migrate.imports.conversion import Launch

Group = Literal["mapped", "default", "ignored", "unread", "refused"]
TITLES: dict[Group, str] = {
    "mapped": "Mapped",
    "default": "Defaults of {} that differ from those here, applied",
    "ignored": "Without meaning here",
    "unread": "Not read: they set nothing here",
    "refused": "Refused",
}


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    group: Group
    key: str
    """As it was written."""
    value: Any
    becomes: str
    note: str = ""


@dataclass
class Imported:
    """What an import gives."""

    project: str
    """The other project."""
    entries: list[Entry]
    settings: dict[str, Any]
    """Dotted setting here -> value, of those that differ from the defaults."""
    origins: dict[str, str]
    """Dotted setting here -> the comment that names where it is from."""
    notices: list[str] = field(default_factory=list)
    launch: Launch | None = None
    """The processes that the other project starts; None: its settings do not say."""

    def refused(self) -> list[Entry]:
        """Return the entries without a counterpart."""
        return [each for each in self.entries if each.group == "refused"]
