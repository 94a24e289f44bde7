"""The settings of another project's run: given ones by their names in the tables, and its defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hwgrpo.errors import ConfigError, choice_error, nearest, shown
from hwgrpo.migrate.imports.hydra_values import primitive
from hwgrpo.migrate.imports.reading_budget import MOST_DIGITS
from hwgrpo.migrate.imports.variable_text import VariableText, known
from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.peer_row import UNSET, PeerRow

NULL_COUNTS = (
    *(f"actor_rollout_ref.model.{each}" for each in ("lora_rank", "lora.rank")),
    *(f"actor_rollout_ref.actor.clip_ratio_{each}" for each in ("low", "high", "c")),
    *(f"actor_rollout_ref.actor.optim.{each}" for each in ("lr_warmup_steps", "min_lr", "min_lr_ratio")),
)
"""Numbers with a default whose null the projects read, too."""
NEVER_NULL = ("actor_rollout_ref.model.path",)
"""Texts that are read, and have a default."""

_LONGEST_KEY = 200
"""Characters of a key that is compared with the known ones."""
_MOST_UNKNOWN = 50
"""Unknown keys that an error names."""
_TOO_LARGE = 10.0**300
"""No setting is as large, and a product of two is infinite."""


@dataclass
class PeerSettings:
    """What a run of another project is set to."""

    names: PeerNames
    given: dict[str, Any] = field(default_factory=dict)
    """Name of the tables -> value."""
    written: dict[str, str] = field(default_factory=dict)
    """Name of the tables -> the name as it was written."""
    notes: dict[str, str] = field(default_factory=dict)
    """Name of the tables -> why it was written by another name."""
    repeated: dict[str, str] = field(default_factory=dict)
    """A further name, as it was written, of a setting that is given -> its name in the tables."""
    added: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """A key that is no setting of the project, and written with `+` -> the value, and a known key that is near."""
    unknown: frozenset[str] = frozenset()
    """Names of the tables that are given a value that is not known: the project's default is not that of the run."""

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, the project's default where it is not given, None where it has none.

        Raises:
            ConfigError: it is null, and no number or choice of the project.
        """
        row = self.names.row_of(key) or self.names.rows[key]
        default = None if row.default is UNSET else row.default
        if key not in self.given:
            return default
        counts = row.values or {"int", "number"} & {*row.type.split("|")} or key in NEVER_NULL
        if self.given[key] is None and default is not None and counts and key not in NULL_COUNTS:
            choices = f", or choose one of: {', '.join(row.values)}" if row.values else ""
            raise ConfigError(
                f"{self.written[key]}=null: {self.names.project} needs a value; leave the key out for the default "
                f"{shown(default)}{choices}"
            )
        return self.given[key]

    def is_given(self, key: str) -> bool:
        """Return whether a key is given a value."""
        return self.given.get(key) is not None

    def count(self, key: str) -> int | None:
        """Return a number of devices or nodes; None: it is not known.

        Raises:
            ConfigError: it is below 1.
        """
        if key in self.unknown:
            return None
        if self[key] < 1:
            raise ConfigError(f"{key}={self[key]} must be at least 1")
        return self[key]

    def below(self, prefix: str) -> dict[str, Any]:
        """Return the given settings below a prefix, their names without it."""
        return {key.removeprefix(prefix): value for key, value in self.given.items() if key.startswith(prefix)}


def fill(
    settings: PeerSettings, values: Mapping[str, Any], *, deleted: Iterable[str] = (), added: Collection[str] = ()
) -> None:
    """Add settings under the names of the tables, checked.

    Args:
        settings: receives them.
        values: key as it was written -> value.
        deleted: keys that `~key` deletes.
        added: keys that `+key` adds to the project's config, which may be unknown.

    Raises:
        ConfigError: unknown keys, all of them, with the nearest known ones; or an illegal value, with the legal ones.
    """
    names, unknown = settings.names, []
    for written, value in values.items():
        key, why = names.current_name(written)
        row = names.row_of(key)
        if row is None and written in added:
            settings.added[written] = value, _near(names, written)
            continue
        if row is None:
            unknown.append(written)
            continue
        if key in settings.given and None in (settings.given[key], value):
            value = settings.given[key] if value is None else value
        elif key in settings.given and settings.given[key] != value:
            raise ConfigError(
                f"{settings.written[key]}={shown(settings.given[key])} and {written}={shown(value)} are one setting; "
                "leave one of them out"
            )
        if key in settings.given:
            settings.repeated[settings.written[key]] = key
        settings.given[key] = _checked(names.project, row, written, value)
        settings.written[key] = written
        if why:
            settings.notes[key] = f"{why} {key}"
    if unknown:
        more = f"; and {len(unknown) - _MOST_UNKNOWN} more" if len(unknown) > _MOST_UNKNOWN else ""
        raise ConfigError("; ".join(_unknown(names, each) for each in unknown[:_MOST_UNKNOWN]) + more)
    for key in deleted:
        row = names.row_of(names.current_name(key)[0])
        if row is None or row.kind not in ("ignored", "refused"):
            raise ConfigError(f"~{key} deletes a setting of {names.project}; give it a value instead")


def _unknown(names: PeerNames, key: str) -> str:
    near = _near(names, key)
    return f"unknown key of {names.project} {shown(key)}" + (f": did you mean {near}?" if near else "")


def _near(names: PeerNames, key: str) -> str:
    """Return the known key that is nearest; "": there is none."""
    known = {each for each in names.rows if not each.endswith(".*")} | {name for name, _ in names.counterparts()}
    near = nearest(key, known) if len(key) <= _LONGEST_KEY else None
    last = key.rpartition(".")[2]
    if near is None or near.rpartition(".")[2] != last:
        same = sorted(each for each in known if each.rpartition(".")[2] == last)
        near = nearest(key, same) or (same[0] if same else near)
    return near or ""


def _checked(project: str, row: PeerRow, written: str, value: Any) -> Any:
    """Return a value as the row's type.

    Raises:
        ConfigError: it has another type, or is none of the choices.
    """
    if value is None or (isinstance(value, VariableText) and primitive(value.value) is None):
        return None
    if row.key.endswith(".*") or (row.type == "mapping" and isinstance(value, Mapping)):
        return _free(value)
    if row.values:
        text = str(known(value))
        if text not in row.values:
            raise choice_error(written, value, row.values)
        return text
    if isinstance(value, VariableText) and row.type != "text" and not isinstance(read := primitive(value.value), str):
        value = read
        if value is None:
            return None
    for kind in row.type.split("|"):
        if not kind or isinstance(value, {"list": list, "mapping": Mapping}.get(kind, ())):
            return value
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "text" and isinstance(value, str | int | float) and not isinstance(value, bool):
            return value if isinstance(value, str) else str(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _TOO_LARGE:
            if kind == "int" and value == int(value):
                return int(value)
            if kind == "number":
                return float(value)
    wanted = {"bool": "true or false", "int": "a whole number", "number": "a number", "text": "text", "list": "a list"}
    wanted["mapping"] = "a mapping, {name: value}"
    raise ConfigError(
        f"{written}={shown(value)} must be {' or '.join(wanted[kind] for kind in row.type.split('|'))}, as in {project}"
    )


def _free(value: Any) -> Any:
    """Return a value of any type with numbers and truth values of variables as such, unless they may be secret."""
    if isinstance(value, list):
        return [*map(_free, value)]
    if isinstance(value, dict):
        return {name: _free(each) for name, each in value.items()}
    if not isinstance(value, VariableText) or value.may_be_secret:
        return value
    return value if isinstance(read := primitive(value.value), str) else read


def typed(names: PeerNames, key: str, value: Any) -> Any:
    """Return a value that is written as text as the number, truth value or null that its row wants."""
    row = names.row_of(names.current_name(key)[0])
    if row is None or row.values or not isinstance(value, str) or "text" in row.type:
        return value
    if len(value) > MOST_DIGITS:
        return value
    if value.lower() in ("none", "null", "~"):
        return None
    if "bool" in row.type and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if row.type in ("int", "number"):
        try:
            return float(value)
        except ValueError:
            return value
    return value
