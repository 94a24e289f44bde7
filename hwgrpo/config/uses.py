"""Settings without effect: one rule, driven by `used_by` of the schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hwgrpo.config.fields import AnyOf, Limits, Use
from hwgrpo.config.schema import Settings
from hwgrpo.config.typed import hints_of
from hwgrpo.errors import ConfigError, shown


def check_used(config: Settings, imported: Collection[str] = ()) -> list[str]:
    """Check that every setting that differs from its default has an effect.

    Args:
        config: the settings, each within its limits.
        imported: settings or sections that the user did not choose.

    Returns:
        A note for each setting of `imported` that has none.

    Raises:
        ConfigError: the first other one that has none; the message names the setting that would use it.
    """
    notes = []
    for key, message in _unused(config, config, "", ()):
        if not any(key == name or key.startswith(name + ".") for name in imported):
            raise ConfigError(message)
        notes.append(message)
    return notes


def unused_settings(config: Settings) -> set[str]:
    """Return the keys of non-default settings that have no effect."""
    return {key for key, _ in _unused(config, config, "", ())}


def _unused(config: Settings, section: Any, prefix: str, inherited: Sequence[AnyOf]) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each setting of a section without effect."""
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        conditions = (*inherited, *field.metadata.get("used_by", ()))
        if dataclasses.is_dataclass(value):
            yield from _unused(config, value, key + ".", conditions)
            continue
        if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for i, element in enumerate(value):
                yield from _unused(config, element, f"{key}.{i}.", conditions)
            continue
        default = default_of(field)
        if value == default or value in field.metadata.get("accepted_unused", ()):
            continue
        for condition in conditions:
            others = [(use, *_look_up(config, section, prefix, use.key)) for use in condition]
            if not any(use.fulfilled(other) for use, _, other in others):
                found = ", ".join(f"{name}={shown(other)}" for _, name, other in others)
                wanted = describe(condition, prefix)
                yield (
                    key,
                    f"{key}={shown(value)} has no effect with {found}; set {wanted}, or leave {key} at "
                    f"its default {shown(default)}",
                )
                break


def _look_up(config: Settings, section: Any, prefix: str, key: str) -> tuple[str, Any]:
    """Return the full key and the value of the setting that a condition names."""
    if key.startswith("."):
        return prefix + key[1:], getattr(section, key[1:])
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return key, value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a new default of a schema's field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def describe(condition: AnyOf, prefix: str) -> str:
    """Return a condition as text; `prefix` is the section of relative keys, with a dot."""
    return " or ".join(_describe(use, prefix) for use in condition)


def _describe(use: Use, prefix: str) -> str:
    key = prefix + use.key[1:] if use.key.startswith(".") else use.key
    if use.suffix:
        return (key + use.suffix).rstrip()
    values: Sequence[Any] = use.values
    if use.excluded:
        values = [name for name in _choices(use.key) if name not in use.values]
    return f"{key}={' or '.join(map(str, values))}"


def _choices(key: str) -> Sequence[str]:
    """Return the allowed names of a setting by its full key."""
    section: Any = Settings
    *sections, last = key.split(".")
    for name in sections:
        section = hints_of(section)[name]
    limits: Limits = next(field for field in dataclasses.fields(section) if field.name == last).metadata["limits"]
    return limits.names() or ()
