"""Dataclass fields with their limits and conditions, so that the schema states each once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hwgrpo.registry import Registry
from hwgrpo.user_code import FORM, names_a_file

Choices = Iterable[str] | Callable[[], Iterable[str]]

LARGEST_INTEGER = 2**31 - 1
"""Bound of integers without one: counts and sizes beyond it overflow somewhere between here and a device."""
LARGEST_NUMBER = 3e38
"""Bound of numbers without one: what single precision can hold."""
LONGEST_TIMEOUT = 1e7
"""Seconds, about 115 days; operating systems overflow on longer ones."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Allowed values of a field. `above` and `below` exclude the bound; a registry provides choices lazily."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Choices | None = None
    files: bool = False
    """Whether a user's function is allowed, as `path/to/file.py:function`."""

    def names(self) -> tuple[str, ...] | None:
        """Return the allowed names, or None when the field is not a choice."""
        if self.choices is None:
            return None
        return tuple(self.choices() if callable(self.choices) else self.choices)

    def describe(self, value: float | None = None) -> str:
        """Describe the allowed values: "0 < x <= 1", "one of: a, b", or "" for any.

        Args:
            value: a number that is not accepted; beyond the bound of all numbers, that bound is named.
        """
        names = self.names()
        if names is not None:
            return "one of: " + ", ".join(names) + (f", or {FORM}" if self.files else "")
        if value is not None and self.at_most is None and self.below is None:
            largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
            if abs(value) > largest:
                return f"at most {_bound(largest)}"
        low = f"{_bound(self.at_least)} <= " if self.at_least is not None else ""
        low = f"{_bound(self.above)} < " if self.above is not None else low
        high = f" <= {_bound(self.at_most)}" if self.at_most is not None else ""
        high = f" < {_bound(self.below)}" if self.below is not None else high
        if self == Limits():
            return "a finite number"
        if low and not high:
            bound = self.at_least if self.at_least is not None else self.above
            return f"{'at least' if self.at_least is not None else 'above'} {_bound(bound)}"
        return f"{low}x{high}" if low or high else ""

    def accepts(self, value: float | str) -> bool:
        """Whether a number is finite and lies within the limits; the field's type decides on other values."""
        if isinstance(value, str):
            return True
        largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
        return (
            abs(value) <= (largest if self.at_most is None else max(largest, self.at_most))
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


@dataclasses.dataclass(frozen=True)
class Use:
    """A condition on another setting, under which a setting has an effect."""

    key: str
    """The other setting; with a leading dot, in the same section."""
    values: tuple[Any, ...] = ()
    suffix: str = ""
    """Text of the condition, after the key; "": the values."""
    test: Callable[[Any], bool] | None = None
    """Whether a value of the other setting fulfils it; None: one of `values`, or none of them."""
    excluded: bool = False
    """The values are those under which there is no effect."""

    def fulfilled(self, value: Any) -> bool:
        """Return whether the other setting's value fulfils the condition."""
        return (value in self.values) != self.excluded if self.test is None else self.test(value)


AnyOf = tuple[Use, ...]
"""Conditions of which one is enough."""


def one_of(key: str, *values: Any) -> AnyOf:
    """Return the condition that a setting has one of these values."""
    return (Use(key, values),)


def none_of(key: str, *values: Any) -> AnyOf:
    """Return the condition that a choice is none of these."""
    return (Use(key, values, excluded=True),)


def read_by(key: str, components: Registry, setting: str) -> AnyOf:
    """Return the condition that the component which `key` names reads a setting; one of the user's own may."""
    return none_of(key, *(components.built_in.keys() - {*components.readers(setting)}))


def on(key: str, suffix: str = " ") -> AnyOf:
    """Return the condition that a setting is neither 0, false, null nor empty."""
    return (Use(key, (), suffix, bool),)


def off(key: str, suffix: str = "=null") -> AnyOf:
    """Return the condition that a setting is 0, false, null or empty."""
    return (Use(key, (), suffix, lambda value: not value),)


def holds(key: str, *values: str) -> AnyOf:
    """Return the condition that a list has one of these values."""
    return (Use(key, values, f" with {' or '.join(values)}", lambda listed: bool({*listed} & {*values})),)


def setting(
    default: Any,
    *,
    path: bool = False,
    home: bool = False,
    used_by: Sequence[AnyOf] = (),
    accepted_unused: Sequence[Any] = (),
) -> Any:
    """Return a dataclass field for text, a bool, a list or a mapping.

    Args:
        default: its default; a function makes a new one for every configuration.
        path: it names a file or folder.
        home: a leading `~` is replaced when the settings are loaded. Files that are read keep it, since settings may
            be exported for another host, and their readers replace it.
        used_by: conditions under which it has an effect; all must be fulfilled.
        accepted_unused: values besides the default that are no error where it has no effect.
    """
    return _field(default, path=path, home=home, used_by=used_by, accepted_unused=accepted_unused)


def _bound(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def limited(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    used_by: Sequence[AnyOf] = (),
) -> Any:
    """Return a dataclass field for a number, or a list of numbers, with bounds."""
    limits = Limits(at_least=at_least, at_most=at_most, above=above, below=below)
    return _field(default, limits=limits, used_by=used_by)


def choice(default: Any, choices: Choices, *, files: bool = False, used_by: Sequence[AnyOf] = ()) -> Any:
    """Return a dataclass field for a name out of `choices` (names, or a function that returns them).

    Args:
        default: its default.
        choices: allowed values.
        files: whether a user's function is allowed, as `path/to/file.py:function`.
        used_by: conditions under which it has an effect; all must be fulfilled.
    """
    return _field(default, limits=Limits(choices=choices, files=files), used_by=used_by)


def own_function(key: str) -> AnyOf:
    """Return the condition that a setting names a function in a file."""
    return (Use(key, (), f"={FORM}", names_a_file),)


def _field(default: Any, **metadata: Any) -> Any:
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
