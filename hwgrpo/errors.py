"""Errors that a user can act on: each names the place, the value, what is allowed and the nearest right one."""

import difflib
from collections.abc import Iterable


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word closest to `word`, or None when none resembles it."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def shown(value: object, longest: int = 120) -> str:
    """Return a value as it stands in a message, cut where it is longer than `longest` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"{type(value).__name__} of more than 4300 digits"
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def escaped(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, those that a terminal would not print escaped."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def quoted(value: object, limit: int = 80) -> str:
    """Return a value as a message quotes it: its repr, escaped, of at most `limit` characters.

    Args:
        value: anything, also of a class whose repr raises.
        limit: characters that are shown.
    """
    try:
        text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    except Exception:  # a user's class may raise anything; integers of more than 4300 digits have no repr either
        return f"<{type(value).__name__}>"
    return escaped(text, limit)


def error_text(error: BaseException, limit: int = 500) -> str:
    """Return what an exception says, in one line, escaped, of at most `limit` characters."""
    try:
        text = str(error)
    except Exception:  # a user's class may raise anything
        return f"<{type(error).__name__}>"
    return escaped(" ".join(text.split()), limit)


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, the value and the remedy."""


class DataError(ValueError):
    """A data file or row is wrong. The message names the file and, where there is one, the row."""


class RewardError(RuntimeError):
    """A reward function failed under the policy `raise`. The message names the function and the sample."""


class RunError(RuntimeError):
    """A run cannot go on: numbers that are not finite, a full disk. The message says why and what to try."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, or does not fit this run. The message names the file and what differs."""


class RunFinished(Exception):
    """Nothing is left to train. The message says what is there and how to go on."""


def choice_error(key: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Build the error for a word that is not one of `allowed`, with a did-you-mean where one is near."""
    names = sorted(allowed)
    near = nearest(str(value), names)
    hint = f" Did you mean {near!r}?" if near else ""
    return ConfigError(f"{key}={shown(value)} is not known; choose one of: {', '.join(names)}.{hint}")
