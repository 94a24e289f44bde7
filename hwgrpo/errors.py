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
