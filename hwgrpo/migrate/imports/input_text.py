"""The text of a script or a YAML file that is imported, or of standard input, up to a bound."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.reading_budget import MOST_CHARACTERS


def text_of(file: str, what: str) -> str:
    """Return the text of a file, or of standard input for `-`.

    Raises:
        ConfigError: it cannot be read; the message says `what` is wanted.
    """
    if file == "-":
        return _bounded(sys.stdin, "standard input", what)
    try:
        return read_text(Path(file), what)
    except FileNotFoundError as error:
        raise ConfigError(f"{file} cannot be read: {error}; name {what}") from error


def read_text(file: Path, what: str) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read; the message says `what` is wanted.
    """
    try:
        with Path(os.path.expanduser(file)).open(encoding="utf-8") as opened:
            return _bounded(opened, str(file), what)
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ConfigError(f"{shown(str(file))} cannot be read: {error}; name {what}") from error


def _bounded(file: TextIO, name: str, what: str) -> str:
    try:
        text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(name)} is no text in UTF-8 (byte {error.start + 1}); name {what}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{shown(name)} has more than {MOST_CHARACTERS} characters; name {what}")
    return text
