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
