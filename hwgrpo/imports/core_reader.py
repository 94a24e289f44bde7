"""Settings of OpenRLHF, ROLL or NeMo-RL as they are written: values of the types that their rows want."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hwgrpo.config.yaml_text import MAX_KEYS, read_yaml
from hwgrpo.errors import ConfigError, shown
from hwgrpo.imports.hydra_values import Resolver, flattened, parse_override
from hwgrpo.imports.peer_settings import PeerSettings, fill, typed
from hwgrpo.imports.reading_budget import MOST_CHARACTERS
from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.peer_row import UNSET

_NAMED = ("actor_train.strategy_args.strategy_config", "actor_infer.strategy_args.strategy_config")
"""Settings that may name a config of the project's own, which need not be there."""


def settings_of(names: PeerNames, values: Mapping[str, Any]) -> PeerSettings:
    """Return settings under the names of the tables, checked; text becomes what a row wants.

    Args:
        names: the tables.
        values: key as it was written -> value.

    Raises:
        ConfigError: an illegal value, with the legal ones.
    """
    settings = PeerSettings(names)
    winners = {key: winner for key in values if (winner := _overriding(names, key, values))}
    settings.overridden = {key: (values[key], winner) for key, winner in winners.items()}
    fill(settings, {key: typed(names, key, value) for key, value in values.items() if key not in winners})
    return settings


def _overriding(names: PeerNames, key: str, values: Mapping[str, Any]) -> str | None:
    """Return the name of the same setting in the section that the project reads instead of a key's."""
    others = (first + key.removeprefix(second) for first, second in names.overrides if key.startswith(second))
    current = names.current_name(key)[0]
    return next((each for each in others if each in values and names.current_name(each)[0] == current), None)


def text_of(file: str, what: str) -> str:
    """Return the text of a file, or of standard input for `-`.

    Raises:
        ConfigError: it cannot be read; the message says `what` is wanted.
    """
    if file == "-":
        return _bounded(sys.stdin, "standard input", what)
    try:
        return read_text(Path(file), what)
    except FileNotFoundError as error:
        raise ConfigError(f"{file} cannot be read: {error}; name {what}") from error


def read_text(file: Path, what: str) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read; the message says `what` is wanted.
    """
    try:
        with Path(os.path.expanduser(file)).open(encoding="utf-8") as opened:
            return _bounded(opened, str(file), what)
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ConfigError(f"{shown(str(file))} cannot be read: {error}; name {what}") from error


def _bounded(file: TextIO, name: str, what: str) -> str:
    try:
        text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(name)} is no text in UTF-8 (byte {error.start + 1}); name {what}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{shown(name)} has more than {MOST_CHARACTERS} characters; name {what}")
    return text


def read_yaml_settings(
    names: PeerNames, file: str | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[PeerSettings, list[str]]:
    """Return the settings of a YAML file with Hydra-style overrides, and notices about what was read.

    Files that `defaults` names are read where they lie beside it, or below it by their relative path.

    Args:
        names: the tables of ROLL or NeMo-RL.
        file: a YAML file, or `-` for standard input; None: arguments alone.
        arguments: `key=value`, `+key=value`, `~key`.
        environment: variables, for `${oc.env:NAME}`.

    Raises:
        ConfigError: the file is missing or no mapping; an illegal value; a setting that is read refers to nothing.
    """
    notices: list[str] = []
    values = {} if file is None else _of_yaml(names, file, notices, ())
    for argument in arguments:
        override = parse_override(argument.removeprefix("--"))
        below = flattened({override.key: override.value}) if not override.deletes else ()
        values = {key: value for key, value in values.items() if key != override.key}
        values |= dict(below)
    return settings_of(names, _resolved(names, values, environment)), notices


def _of_yaml(names: PeerNames, file: str, notices: list[str], path: tuple[str, ...]) -> dict[str, Any]:
    if file in path:
        raise ConfigError(f"{file}: defaults name the file itself; remove that entry")
    place = "standard input" if file == "-" else file
    tree = read_yaml(text_of(file, f"a YAML file of {names.project}"), place, Any)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{place} must be a YAML mapping of settings of {names.project}")
    defaults = tree.get("defaults") or []
    values: dict[str, Any] = {}
    for each in [defaults] if isinstance(defaults, str) else defaults:
        name = str(each).partition("@")[0]
        base = Path(file).parent / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if base.is_file():
            values |= _of_yaml(names, str(base), notices, (*path, file))
        elif name != "_self_":
            notices.append(f"{place}: defaults name {name}, which is not there; its settings are not read")
    return values | dict(flattened({key: value for key, value in tree.items() if key not in ("defaults", "hydra")}))


def _resolved(names: PeerNames, values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return values with their interpolations resolved; those of keys that are not read stay as they are."""
    defaults = {key: None if row.default is UNSET else row.default for key, row in names.rows.items()}
    resolver = Resolver(values, defaults, environment)
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        row = names.row_of(names.current_name(key)[0])
        try:
            known = resolver.resolved(key)
        except ConfigError:
            if key not in _NAMED and row is not None and row.kind in ("same", "joint") and not row.key.endswith(".*"):
                raise
            known = value
        resolved |= dict(flattened({key: known})) if isinstance(known, Mapping) else {key: known}
        if len(resolved) > MAX_KEYS:
            raise ConfigError(f"{key}: interpolations make more than {MAX_KEYS} settings; write the values themselves")
    return resolved
