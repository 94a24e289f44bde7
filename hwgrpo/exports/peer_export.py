"""Settings here -> another project's settings, and what is lost: found by importing those again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.catalog import TASK_SCHEMES
from hwgrpo.config import Config
from hwgrpo.config.document import entries
from hwgrpo.config.keys import expand_names
from hwgrpo.config.typed import build
from hwgrpo.config.uses import unused_settings
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.recipe_text import nested
from hwgrpo.imports.variable_text import VariableText, known
from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.peer_row import UNSET, PeerRow


@dataclass(frozen=True)
class Lost:
    """A setting of the recipe that the other project's run does not have."""

    key: str
    value: Any
    becomes: Any
    """What that run has instead, as a value of this setting; UNSET where it cannot read the value."""
    why: str = ""


@dataclass(frozen=True)
class Exported:
    """A recipe as settings of another project."""

    project: str
    settings: dict[str, Any]
    """Those that differ from the project's defaults."""
    lost: list[Lost]


def export_peer(
    config: Config,
    names: PeerNames,
    joint: Mapping[str, Any],
    import_again: Callable[[Mapping[str, Any]], Imported],
    reasons: Mapping[str, str],
    unreadable: Mapping[str, str] | None = None,
) -> Exported:
    """Return a recipe in another project's settings.

    Args:
        config: checked settings.
        names: the project's tables.
        joint: the values of keys that are converted together.
        import_again: reads and imports settings of the project.
        reasons: setting here -> why the project has no counterpart.
        unreadable: setting here -> why the project cannot read its value.
    """
    values = {**_same(config, names), **joint}
    values = {key: value for key, value in values.items() if not _is_default(names, key, value)}
    imported = import_again(values)
    refused = {each.key for each in imported.refused()}
    if refused:
        values = {key: value for key, value in values.items() if key not in refused}
        imported = import_again(values)
    required = {"model.path": "", "data.train": ""}
    there: Config = build(Config, expand_names(nested(required | imported.settings)), "")
    unused = unused_settings(config)
    lost = [
        Lost(key, here, value, reasons.get(key, ""))
        for key in (each.key for each in entries() if "[]" not in each.key and each.key != "algorithm.preset")
        if key not in unused and known(here := _value(config, key)) != known(value := _value(there, key))
    ]
    listed = {each.key for each in lost}
    lost += [Lost(key, _value(config, key), UNSET, why) for key, why in (unreadable or {}).items() if key not in listed]
    return Exported(names.project, values, lost)


def inverse(row: PeerRow, value: Any) -> Any:
    """Return the project's first value that becomes a value here; UNSET where none does."""
    if isinstance(value, VariableText):
        return value
    if row.values:
        return next((name for name, here in row.values.items() if here.partition(" | ")[0] == value), UNSET)
    replaced = {here: there for there, here in row.replaces.items()} if not isinstance(value, list | dict) else {}
    return replaced.get(value, value) if value not in row.replaces or value in replaced else UNSET


def choice(rows: Mapping[str, PeerRow], key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a key with the project's value of a choice; nothing where it has none."""
    found = inverse(rows[key], value)
    if found is not UNSET:
        yield key, found


def _same(config: Config, names: PeerNames) -> dict[str, Any]:
    values = {}
    for row in names.rows.values():
        if row.kind != "same":
            continue
        value = _value(config, row.here)
        if value is None or value == _of_default(row):
            continue
        found = inverse(row, value) if not isinstance(value, list | dict) else value
        if found is not UNSET:
            values[row.key] = found
    return values


def _of_default(row: PeerRow) -> Any:
    """Return what the project's default becomes; the default here where it has none."""
    default = row.default
    if default is UNSET or default is None:
        return _value(Config(), row.here)
    if row.values:
        return row.values[default].partition(" | ")[0]
    return row.replaces.get(default, default) if not isinstance(default, list | dict) else default


def _is_default(names: PeerNames, key: str, value: Any) -> bool:
    row = names.rows.get(key)
    return row is not None and row.default == value and isinstance(row.default, bool) == isinstance(value, bool)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def synthetic(config: Config, project: str) -> dict[str, str]:
    """Return the settings that name models or data that only hwgrpo makes, with the reason."""
    schemes = {"data.train": TASK_SCHEMES, "data.validation": TASK_SCHEMES, "model.path": ("builtin://",)}
    named = ((key, scheme) for key, each in schemes.items() for scheme in each)
    made = {key: scheme for key, scheme in named if scheme in str(known(_value(config, key)))}
    return {key: f"{project} has no {scheme}: give it a path" for key, scheme in made.items()}
