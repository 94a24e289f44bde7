"""Bounds on what is read of another project's files: a stranger's few lines can stand for more than memory holds."""

from __future__ import annotations

from hwgrpo.errors import ConfigError

MOST_CHARACTERS = 2_000_000
"""Characters that all values of a file may become together; the longest run scripts and configs have 20,000."""
DEEPEST = 50
"""Levels of brackets, quotes and references."""
MOST_DIGITS = 400
"""Python itself refuses to convert more than 4300."""


class Budget:
    """What may still be read.

    Args:
        what: what is read, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what, self._left = what, MOST_CHARACTERS

    def spend(self, characters: int, place: str) -> None:
        """Count characters.

        Raises:
            ConfigError: they are more than is left; it names the place.
        """
        self._left -= characters
        if self._left < 0:
            raise ConfigError(
                f"{place}: {self._what} become more than {MOST_CHARACTERS} characters, which no run needs; write the "
                "values themselves"
            )


def check_depth(depth: int, place: str) -> None:
    """Check that brackets, quotes or references do not go too deep.

    Raises:
        ConfigError: they do; it names the place.
    """
    if depth > DEEPEST:
        raise ConfigError(f"{place}: more than {DEEPEST} levels deep, which no run needs; write the value itself")
