"""Overrides: `section.key=value` arguments of the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from hwgrpo.config.keys import expand_names, type_of_key
from hwgrpo.config.schema import Settings
from hwgrpo.config.typed import hint_below, is_list
from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, shown
from hwgrpo.text import HIDDEN, is_secret

_OVERRIDE = "write section.key=value, e.g. rollout.n=16"


def parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if key.startswith("~"):
        raise ConfigError(
            f"{shown(override)} deletes a setting, which is not possible; {_OVERRIDE}, with the default or null"
        )
    if not equals or not key:
        raise ConfigError(f"{shown(override)} is not an override; {_OVERRIDE}")
    hint = type_of_key(key)
    return key, read_yaml(text, _shown_override(key, text), hint)


def apply_override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is merged into the one that is there, a list replaces it.

    An index goes into the list that is there, or else into the default.
    """
    *parents, last = key.split(".")
    here: Any = raw
    hint: Any = Settings
    for i, name in enumerate([*parents, last]):
        where = ".".join(key.split(".")[:i])
        if isinstance(here, list):
            if int(name) >= len(here):
                count = f"it has {len(here)}, counted from 0" if here else "it is empty"
                raise ConfigError(f"{key}: {where} has no entry {name}: {count}; set {where}=[...] as a list")
            slot: Any = int(name)
        elif isinstance(here, dict):
            slot = name
            if i < len(parents) and name not in here:
                here[name] = _default_list(hint, name) if is_list(hint_below(hint, name)) else {}
        else:
            raise ConfigError(f"{key}: {where}={shown(here)} has nothing below it; set {where} first")
        hint = hint_below(hint, name)
        if i < len(parents):
            here = here[slot]
        else:
            old = here[slot] if isinstance(here, list) else here.get(slot)
            here[slot] = merge(old, value)
    expand_names(raw)


def merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: merge(old.get(name), value) for name, value in new.items()}}
    return new


def _shown_override(key: str, text: str) -> str:
    """Return an override for a message, without the value of a secret."""
    return f"{key}={HIDDEN if any(map(is_secret, key.split('.'))) else shown(text)}"


def _default_list(section: Any, name: str) -> list[Any]:
    field = next(f for f in dataclasses.fields(section) if f.name == name)
    if field.default_factory is dataclasses.MISSING:
        return []  # required, or text by default
    return [dataclasses.asdict(e) if dataclasses.is_dataclass(e) else e for e in field.default_factory()]  # type: ignore[arg-type]
