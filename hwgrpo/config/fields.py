"""Dataclass fields that carry their own limits, so that the schema states once what is allowed."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

Choices = Iterable[str] | Callable[[], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a field accepts. `above` and `below` exclude the bound; choices may be given lazily by a registry."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Choices | None = None

    def names(self) -> tuple[str, ...] | None:
        """Return the allowed words, or None when the field is not a choice."""
        if self.choices is None:
            return None
        return tuple(self.choices() if callable(self.choices) else self.choices)

    def describe(self) -> str:
        """Say in a few words what is allowed: "0 < x <= 1", "one of: a, b", or "" for anything."""
        names = self.names()
        if names is not None:
            return "one of: " + ", ".join(names)
        low = f"{self.at_least:g} <= " if self.at_least is not None else ""
        low = f"{self.above:g} < " if self.above is not None else low
        high = f" <= {self.at_most:g}" if self.at_most is not None else ""
        high = f" < {self.below:g}" if self.below is not None else high
        if self == Limits():
            return "a finite number"
        if low and not high:
            bound = self.at_least if self.at_least is not None else self.above
            return f"{'at least' if self.at_least is not None else 'above'} {bound:g}"
        return f"{low}x{high}" if low or high else ""

    def accepts(self, value: float) -> bool:
        """Whether a number is finite and lies within the limits."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def limited(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field for a number with bounds."""
    limits = Limits(at_least=at_least, at_most=at_most, above=above, below=below)
    return dataclasses.field(default=default, metadata={"limits": limits})


def choice(default: Any, choices: Choices) -> Any:
    """Return a dataclass field for a word out of `choices` (names, or a function that returns them)."""
    return dataclasses.field(default=default, metadata={"limits": Limits(choices=choices)})


def section_of(annotation: Any) -> type | None:
    """Return the dataclass behind a type hint: itself, or the element of a list of them."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return annotation
    if typing.get_origin(annotation) is list:
        return section_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((s for s in map(section_of, typing.get_args(annotation)) if s), None)
    return None
