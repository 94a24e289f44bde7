"""Loading of reward functions by registered name, from a Python file, or as a Python object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hwgrpo import user_code
from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.given_objects import find_object, is_object, name_of

DEFAULT_FUNCTION = "compute_score"


def load_function(name: str, key: str) -> tuple[str, Callable[..., Any]]:
    """Find a reward function.

    Args:
        name: a registered name, `path/to/file.py:function`, `path/to/file.py` (its `compute_score`), or `object://NAME`.
        key: the setting, for messages ("reward.functions[0].name").

    Returns:
        (short name for metrics, the function).

    Raises:
        ConfigError: unknown name; the message lists the registered ones.
    """
    file, function = split_name(name)
    if is_object(name):
        return function, find_object(name, key)
    if file is None:
        if name not in REWARDS:
            error = choice_error(key, name, REWARDS.names())
            raise ConfigError(f"{error} A function of your own is named {user_code.FORM}.")
        return name, REWARDS.load(name)
    return function, user_code.load_function(name, key, DEFAULT_FUNCTION)


def split_name(name: str) -> tuple[str | None, str]:
    """Return the file in a reward's name (None for a registered one, an object) and the function's name in metrics."""
    return (None, name_of(name)) if is_object(name) else user_code.split_name(name, DEFAULT_FUNCTION)
