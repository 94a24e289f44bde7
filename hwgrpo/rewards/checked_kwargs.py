"""Checks of the arguments of rewards that come from the config."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hwgrpo.errors import ConfigError, choice_error, shown


class Kwargs:
    """Checks of the `kwargs` of one reward.

    Args:
        key: the reward's setting, for messages ("reward.functions[0]").
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def error(self, name: str, value: Any, problem: str) -> ConfigError:
        """Return the error for an argument: its key, its value and the problem with its remedy."""
        return ConfigError(f"{self._key}.kwargs.{name}={shown(value)} {problem}")

    def number(
        self, name: str, value: Any, *, at_least: float | None = None, above: float | None = None, whole: bool = False
    ) -> None:
        """Raise `ConfigError` unless a value is a number in a range, or None where that is its default."""
        kinds = (int,) if whole else (int, float)
        wanted = "a whole number" if whole else "a number"
        if at_least is not None:
            wanted += f" of at least {at_least:g}"
        if above is not None:
            wanted += f" above {above:g}"
        in_range = (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
        )
        if not in_range:
            raise self.error(name, value, f"must be {wanted}")

    def choice(self, name: str, value: Any, allowed: Collection[str]) -> None:
        """Raise `ConfigError` unless a value is one of `allowed`."""
        if value not in allowed:
            raise choice_error(f"{self._key}.kwargs.{name}", value, allowed)

    def boolean(self, name: str, value: Any) -> None:
        """Raise `ConfigError` unless a value is true or false."""
        if not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")

    def text(self, name: str, value: Any) -> None:
        """Raise `ConfigError` unless a value is a text that is not empty."""
        if not isinstance(value, str) or not value:
            raise self.error(name, value, "must be a text")
