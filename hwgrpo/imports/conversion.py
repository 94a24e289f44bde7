"""What a setting of another project becomes: assignments of settings here, remarks, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Assignment:
    """A setting here that follows from others."""

    key: str
    value: Any
    origins: tuple[str, ...]
    """The keys of the other project that it follows from."""
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """Why keys of the other project set nothing here."""

    origins: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Refusal:
    """A value of the other project without a counterpart."""

    origin: str
    value: Any
    why: str
    instead: str


Converted = Assignment | Remark | Refusal


def lower_clip(value: float, origins: tuple[str, ...]) -> Assignment:
    """Return the lower bound `1 - value` of a ratio; one of 0 or less is none, because ratios are positive."""
    note = "the ratio has no lower bound" if value > 1 else ""
    return Assignment("algorithm.loss.clip_low", min(value, 1.0), origins, note)
