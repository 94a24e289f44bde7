"""Errors for users: each names the key, the value, the allowed values and the nearest of them."""

import difflib
from collections.abc import Iterable


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`, or None when none resembles it.

    The same name in another case comes first, then one that continues `name` (`ppo` means `ppo_clip`, not `dppo_tv`),
    then the one spelled most alike.
    """
    by_lower = {each.lower(): each for each in allowed}
    lower = name.lower()
    if lower in by_lower:
        return by_lower[lower]
    continued = sorted((each for each in by_lower if each.startswith((f"{lower}_", f"{lower}-"))), key=len)
    matches = [*continued, *difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.6)]
    return by_lower[matches[0]] if matches else None


def shown(value: object, longest: int = 120) -> str:
    """Return a value for a message, cut to `longest` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"{type(value).__name__} of more than 4300 digits"
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def escaped(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, with unprintable ones escaped."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def quoted(value: object, limit: int = 80) -> str:
    """Return the repr of a value for a message, escaped, of at most `limit` characters.

    Args:
        value: any object, also of a class whose repr raises.
        limit: maximum number of characters.
    """
    try:
        text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    except Exception:  # a user's class may raise anything; integers of more than 4300 digits have no repr either
        return f"<{type(value).__name__}>"
    return escaped(text, limit)


def error_text(error: BaseException, limit: int = 500) -> str:
    """Return the message of an exception in one line, escaped, of at most `limit` characters."""
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
    """A run cannot continue, e.g. non-finite numbers or a full disk. The message has the reason and the remedy."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, or does not fit this run. The message names the file and what differs."""


class RunFinished(Exception):
    """The run is finished. The message names its results and how to continue."""


def choice_error(key: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Return the error for a value that is not one of `allowed`, with the nearest one as a suggestion."""
    names = sorted(allowed)
    near = nearest(str(value), names)
    hint = f" Did you mean {near!r}?" if near else ""
    return ConfigError(f"{key}={shown(value)} is not known; choose one of: {', '.join(names)}.{hint}")
