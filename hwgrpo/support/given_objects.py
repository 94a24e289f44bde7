"""Python objects that settings name: `object://NAME`, for what is given to `hwgrpo.Trainer`.

A name is known only within `given`, which a trainer enters while it checks its settings and builds its run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hwgrpo.errors import ConfigError

PREFIX = "object://"
TOOL, ENVIRONMENT = f"{PREFIX}tool:", f"{PREFIX}environment:"
"""Prefixes of tools and environments, which may have the names of reward functions."""

_objects: dict[str, Any] = {}


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let settings name objects in the body; other objects given before are not known there.

    Args:
        objects: `object://NAME` -> the object.
    """
    before = dict(_objects)
    _objects.clear()
    _objects.update(objects)
    try:
        yield
    finally:
        _objects.clear()
        _objects.update(before)


def is_object(name: object) -> bool:
    """Return whether a setting names an object."""
    return isinstance(name, str) and name.startswith(PREFIX)


def name_of(name: str) -> str:
    """Return the name of an object without the prefix; any other name unchanged."""
    for prefix in (TOOL, ENVIRONMENT):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name.removeprefix(PREFIX)


def find_object(name: str, key: str) -> Any:
    """Return the object that a setting names.

    Args:
        name: value of the setting.
        key: the setting, for messages.

    Raises:
        ConfigError: no such object was given in this process.
    """
    if name not in _objects:
        raise ConfigError(
            f"{key}={name!r} is a Python object, and none of that name was given to hwgrpo.Trainer here: pass it "
            "there, or set a file or a registered name"
        )
    return _objects[name]
