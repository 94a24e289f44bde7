"""A row of a table of another project's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


class _Unset:
    """The default of a key whose default here is kept: it concerns speed, memory or names alone."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()
Kind = Literal["same", "joint", "ignored", "refused"]


@dataclass(frozen=True)
class PeerRow:
    """One key of another project, or all keys below one (`ray_kwargs.*`)."""

    key: str
    kind: Kind
    """same: one setting here; joint: converted together with others; ignored: without meaning here; refused: without a
    counterpart, unless its value is one of `neutral`."""
    here: str = ""
    """The settings here, with commas between them."""
    note: str = ""
    """What differs; of an ignored or refused key, why."""
    default: Any = UNSET
    """Its default; UNSET where the default here is kept, None where it has none."""
    type: str = ""
    """bool, int, number, text, list, mapping; several with `|`; "" takes any value."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Legal values -> values here, where it is a choice."""
    replaces: Mapping[Any, Any] = field(default_factory=dict)
    """Single values -> values here; all others stay."""
    neutral: tuple[Any, ...] = ()
    instead: str = ""
    """The nearest thing here for a refused value."""


_TYPES = {bool: "bool", int: "int", float: "number", str: "text", list: "list", dict: "mapping"}


def same(key: str, here: str, default: Any = UNSET, note: str = "", **more: Any) -> PeerRow:
    """Return the row of a key with one counterpart."""
    return PeerRow(key, "same", here, note, default, **{"type": _TYPES.get(type(default), ""), **more})


def joint(key: str, here: str, default: Any = UNSET, note: str = "", **more: Any) -> PeerRow:
    """Return the row of a key that is converted together with others."""
    return PeerRow(key, "joint", here, note, default, **{"type": _TYPES.get(type(default), ""), **more})


def ignored(why: str, *keys: str) -> tuple[PeerRow, ...]:
    """Return the rows of keys without meaning here."""
    return tuple(PeerRow(key, "ignored", note=why) for key in keys)


def refused(why: str, instead: str, *neutral: Any, keys: tuple[str, ...]) -> tuple[PeerRow, ...]:
    """Return the rows of keys without a counterpart, all with the same neutral values, the default first."""
    return tuple(PeerRow(key, "refused", note=why, neutral=neutral, instead=instead) for key in keys)


def section(prefix: str, *rows: PeerRow | tuple[PeerRow, ...]) -> tuple[PeerRow, ...]:
    """Return rows with a prefix before each key."""
    listed = [row for each in rows for row in (each if isinstance(each, tuple) else (each,))]
    return tuple(replace(row, key=prefix + row.key) for row in listed)
