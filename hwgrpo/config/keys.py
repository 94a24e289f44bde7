"""Keys of settings: the type of each, errors for those that the schema does not have, and `section.key=value`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.catalog import PEER_NAMES
from hwgrpo.config.document import entries
from hwgrpo.config.schema import Settings
from hwgrpo.config.typed import alternatives, hint_below, is_list, section_of
from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, nearest, shown
from hwgrpo.support.text import HIDDEN, is_secret

INDEX = re.compile(r"\.\d+(?=\.|$)")
"""The index of a list's entry within a key."""


def type_of_key(dotted: str) -> Any:
    """Return the type of the setting that an override's key names.

    Raises:
        ConfigError: the schema has no such key; the message names the nearest that it has.
    """
    hint: Any = Settings
    walked: list[str] = []
    for name in dotted.split("."):
        section = section_of(hint)
        prefix = ".".join(walked)
        if is_list(hint):
            if not _is_index(name):
                raise ConfigError(
                    f"unknown key {_shown_key(dotted)}: {prefix} is a list, so a number comes after it: "
                    f"{prefix}.0{'.' + name if section and name in _field_names(section) else ''}=..."
                )
        elif section is not None:
            if name not in _field_names(section):
                raise _unknown_key(".".join([*walked, name]), section, prefix, dotted)
        elif not any(typing.get_origin(kind) is dict for kind in alternatives(hint)) and hint is not Any:
            entry = next(e for e in entries() if e.key == INDEX.sub("[]", prefix))
            raise ConfigError(
                f"unknown key {_shown_key(dotted)}: {prefix} is a single setting ({entry.type}). "
                f"Did you mean {prefix}=...?"
            )
        hint = hint_below(hint, name)
        walked.append(name)
    return hint


def check_keys(values: Any, hint: Any, prefix: str) -> None:
    """Check that the schema has every key of a recipe; types are for `build`.

    Raises:
        ConfigError: the first key that it does not have.
    """
    section = section_of(hint)
    if isinstance(values, list) and section is not None:
        for i, element in enumerate(values):
            check_keys(element, section, f"{prefix}.{i}")
    if not isinstance(values, Mapping) or section is None or is_list(hint):
        return
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if name not in _field_names(section):
            raise _unknown_key(key, section, prefix, next(leaf_keys(value, key)))
        check_keys(value, hint_below(section, name), key)


def _unknown_key(key: str, section: type, prefix: str, full: str | None = None) -> ConfigError:
    """Return the error for a key that the schema does not have.

    Args:
        key: as far as it was followed.
        section: section that should contain it.
        prefix: the key of that section.
        full: the key as it was written, which may name another system's setting.
    """
    if (here := PEER_NAMES.load("key")(full or key)) is not None:
        return ConfigError(f"unknown key {_shown_key(full or key)}: {here}")
    names = _field_names(section)
    last = key.rsplit(".", 1)[-1]
    near = nearest(last, names) or nearest(last.lower(), names)
    elsewhere = [e.key for e in entries() if e.key.rsplit(".", 1)[-1] == last]
    if len(elsewhere) == 1:  # trainer.lr can only mean optim.lr
        near = elsewhere[0]
    elif near:
        near = f"{prefix}.{near}" if prefix else near
    if not near and (here := PEER_NAMES.load("last name")(full or key)) is not None:
        return ConfigError(f"unknown key {_shown_key(full or key)}: {here}")
    hint = f" Did you mean {near}?" if near else ""
    where = f"{prefix} has" if prefix else "The sections are"
    return ConfigError(f"unknown key {_shown_key(key)}.{hint} {where}: {', '.join(names)}.")


def leaf_keys(value: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of all single values below `value`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaf_keys(inner, f"{key}.{name}")
    else:
        yield key


NAMED = (("reward", "functions"), ("rollout", "agent", "tools"), ("rollout", "agent", "environments"))
"""Lists of sections whose entries may be just a name."""


def expand_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Turn each entry that is just a name into {name: ...}, in the lists of `NAMED`."""
    for *sections, name in NAMED:
        section: Any = raw
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        entries = section.get(name) if isinstance(section, dict) else None
        if isinstance(entries, list):
            entries[:] = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    return raw


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _shown_key(key: str) -> str:
    return key if key.isprintable() and 0 < len(key) <= 120 else shown(key)


def _field_names(section: type) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


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
