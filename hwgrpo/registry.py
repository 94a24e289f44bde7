"""Tables of named components, imported only when one is loaded, so that checking a setting imports nothing."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo_backends import entry_points
from hwgrpo_backends.entry_points import EntryPoint

from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.user_code import describe_error, load_function, names_a_file


def import_target(target: str) -> Any:
    """Return the object at `module:attribute`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Component:
    """A built-in component, and what can be asked about it without importing it.

    Example:
        >>> Component("hwgrpo.algorithms.losses:gspo", reads=("clip_low", "clip_high", "delta"))
    """

    target: str
    """`module:attribute`."""
    reads: tuple[str, ...] = ()
    """Settings of its section, besides the name, that it reads; the schema refuses others (`fields.read_by`)."""


class Registry:
    """The components of one kind: name -> object, or its `module:attribute`.

    Args:
        kind: the kind of component in error messages ("policy loss").
        entries: name -> "package.module:attribute", or a `Component`.
        group: entry-point group of further components in installed packages; built-in names have priority.
    """

    def __init__(self, kind: str, entries: Mapping[str, str | Component], group: str | None = None) -> None:
        self.kind = kind
        self.built_in = {name: Component(each) if isinstance(each, str) else each for name, each in entries.items()}
        self._own: dict[str, Any] = {name: each.target for name, each in self.built_in.items()}
        self._group = group

    @functools.cached_property
    def _entries(self) -> dict[str, Any]:
        if self._group is None:
            return self._own
        offered = entry_points.find(sys.path, (self._group,)).entries
        return {entry.name: entry for entry in offered} | self._own

    def names(self) -> tuple[str, ...]:
        """Return the registered names, sorted."""
        return tuple(sorted(self._entries))

    def readers(self, setting: str) -> tuple[str, ...]:
        """Return the names of the built-in components that read a setting of their section, sorted."""
        return tuple(sorted(name for name, each in self.built_in.items() if setting in each.reads))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def has_loaded(self, target: Any) -> bool:
        """Return whether an object is a registered one."""
        return any(entry is target for entry in self._entries.values())

    def check(self, name: str, key: str) -> None:
        """Raise `ConfigError` with `key` if `name` is not registered."""
        if name not in self._entries:
            raise choice_error(key, name, self._entries)

    def load(self, name: str) -> Any:
        """Return the object of a registered name or of `path/to/file.py:function`; import it on first use.

        Raises:
            ConfigError: the name is not registered, or the file has no such function.
        """
        if names_a_file(name):
            from hwgrpo.support.torch_settings import (
                kept_torch_settings,  # imports torch, which this module's importers avoid
            )

            with kept_torch_settings(f"{self.kind}={name!r}"):
                return load_function(name, self.kind)
        self.check(name, self.kind)
        target = self._entries[name]
        if isinstance(target, str):
            target = self._entries[name] = import_target(target)
        elif isinstance(target, EntryPoint):
            target = self._entries[name] = self._offered(target)
        return target

    def _offered(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except Exception as error:
            raise ConfigError(
                f"{self.kind}={entry.name!r}: the package {entry.owner} offers it as {entry.value!r}, which cannot be "
                f"imported: {describe_error(error)}"
            ) from error

    def register(self, name: str) -> Callable[[Any], Any]:
        """Return a decorator that adds an object under `name`; raises ValueError if the name exists."""

        def add(target: Any) -> Any:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = target
            return target

        return add
