"""Settings of another project's run -> settings here, and an account of every key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.document import entries as entries_here
from hwgrpo.config.keys import expand_names
from hwgrpo.config.typed import build
from hwgrpo.config.uses import check_used, unused_settings
from hwgrpo.errors import ConfigError, error_text, shown
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Launch, Refusal, Remark
from hwgrpo.migrate.imports.hydra_values import primitive
from hwgrpo.migrate.imports.import_result import Entry, Imported
from hwgrpo.migrate.imports.peer_settings import PeerSettings
from hwgrpo.migrate.imports.recipe_text import compact, nested
from hwgrpo.migrate.imports.variable_text import VariableText, known
from hwgrpo.migrate.tables.peer_row import UNSET, PeerRow

_ORDINARY = 1e15
Conversion = Callable[[Any], Iterator[Converted]]
"""What reads the settings of a project, a kind of `PeerSettings`, and yields what becomes of some of them."""


def import_peer(v: PeerSettings, conversions: Sequence[Conversion], *, notices: Sequence[str] = ()) -> Imported:
    """Return the recipe of another project's run.

    Args:
        v: its settings.
        conversions: of the keys that are converted together.
        notices: for the user, beside the table.

    Raises:
        ConfigError: batch sizes or bounds that the project refuses, too.
    """
    try:
        converted = [*_same(v), *(each for conversion in conversions for each in conversion(v))]
    except (ArithmeticError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else _impossible(v, error) from error
    assignments = {each.key: each for each in converted if isinstance(each, Assignment)}
    refusals = [each for each in converted if isinstance(each, Refusal)]
    launch = next((each for each in converted if isinstance(each, Launch)), None)
    remarks = [each for each in converted if isinstance(each, Remark)]
    remarks += [Remark(launch.origins, launch.command())] if launch is not None else []
    refusals += _refused(v)
    defaults = {each.key: _default(each.key) for each in assignments.values()}
    settings = {key: each.value for key, each in assignments.items() if each.value != defaults[key]}
    unused = _unused(settings)
    order = {each.key: i for i, each in enumerate(entries_here())}
    settings = {key: settings[key] for key in sorted(settings, key=order.__getitem__) if key not in unused}
    entries = [_entry(v, key, assignments, remarks, refusals, unused) for key in v.given]
    entries += [Entry("ignored", name, v.given[key], "", f"as {v.written[key]}") for name, key in v.repeated.items()]
    entries += [Entry("unread", f"+{key}", value, "", _of_added(v, near)) for key, (value, near) in v.added.items()]
    entries += [
        Entry("refused", each.origin, each.value, "", f"{each.why}; nearest: {each.instead}")
        for each in refusals
        if each.origin not in v.given
    ]
    entries += [
        Entry("default", _names_of(each), _values_of(v, each), _shown(each), each.note)
        for key, each in assignments.items()
        if key in settings and not any(origin in v.given for origin in each.origins)
    ]
    origins = {key: _origin(v, assignments[key]) for key in settings}
    return Imported(v.names.project, entries, settings, origins, list(notices), launch)


def _impossible(v: PeerSettings, error: Exception) -> ConfigError:
    """Return the error for numbers that cannot be computed with: 0 where another is divided by it, or out of range."""
    numbers = {key: value for key, value in v.given.items() if isinstance(value, int | float)}
    odd = [f"{v.written[key]}={shown(value)}" for key, value in numbers.items() if not 0 < abs(value) < _ORDINARY]
    return ConfigError(
        f"the numbers of this run of {v.names.project} cannot be computed with ({error_text(error)}): "
        f"look at {', '.join(odd[:10]) or 'its numbers'}"
    )


def _same(v: PeerSettings) -> Iterator[Converted]:
    """Convert the keys with one counterpart each."""
    for row in v.names.rows.values():
        if row.kind != "same":
            continue
        value = v.given.get(row.key)
        if value is None:
            if row.default is UNSET or row.default is None:
                continue
            value = row.default
        if row.values and not row.values[value]:
            legal = ", ".join(each for each, here in row.values.items() if here)
            yield Refusal(row.key, value, f"{row.here} has no such choice", legal)
            continue
        if row.values:
            value = row.values[value].partition(" | ")[0]
        elif not isinstance(value, list | dict) and known(value) in row.replaces:
            value = row.replaces[known(value)]
        yield Assignment(row.here, value, (row.key,), row.note)


def _refused(v: PeerSettings) -> Iterator[Refusal]:
    """Yield the given keys without a counterpart whose value is not neutral."""
    for key, value in v.given.items():
        row = v.names.row_of(key)
        assert row is not None
        read = primitive(value.value) if isinstance(value, VariableText) else value
        if row.kind == "refused" and not any(read == each and type(read) is type(each) for each in _neutral(row)):
            if row.neutral == (None,) and not read:
                continue
            yield Refusal(key, value, row.note, row.instead)


def _neutral(row: PeerRow) -> Iterator[Any]:
    for each in row.neutral:
        yield each
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield from (int(each), float(each))


def _default(key: str) -> Any:
    """Return the default of a setting here."""
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _unused(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that have no effect beside the others, with the reason."""
    required = {"model.path": "", "data.train": ""}
    config: Config = build(Config, expand_names(nested(required | dict(settings))), "")
    keys = unused_settings(config)
    notes = check_used(config, keys)
    return {key: note for key in keys for note in notes if note.startswith(f"{key}=")}


def _entry(
    v: PeerSettings,
    key: str,
    assignments: Mapping[str, Assignment],
    remarks: list[Remark],
    refusals: list[Refusal],
    unused: Mapping[str, str],
) -> Entry:
    """Return the line of a given key."""
    row, name, value = v.names.row_of(key), v.written[key], v.given[key]
    assert row is not None
    renamed = v.notes.get(key, "")
    refusal = next((each for each in refusals if each.origin == key), None)
    if refusal is not None:
        return Entry("refused", name, value, "", _joined(f"{refusal.why}; nearest: {refusal.instead}", renamed))
    if row.kind in ("ignored", "refused"):
        why = row.note if row.kind == "ignored" else "its neutral value"
        return Entry("ignored", name, value, "", _joined(why, renamed))
    becomes = [each for each in assignments.values() if key in each.origins]
    used = [each for each in becomes if each.key not in unused]
    if used:
        return Entry("mapped", name, value, ", ".join(map(_shown, used)), _joined(*(e.note for e in used), renamed))
    remark = next((each.note for each in remarks if key in each.origins), "")
    why = (
        next((unused[each.key].partition("; ")[0] for each in becomes), "")
        or remark
        or f"null: the default of {row.here}"
    )
    return Entry("ignored", name, value, "", _joined(why, renamed))


def _of_added(v: PeerSettings, near: str) -> str:
    """Return the note of a key that is added to a project's config."""
    return f"{v.names.project}'s config has no such key" + (f"; did you mean {near}?" if near else "")


def _joined(*notes: str) -> str:
    return "; ".join(dict.fromkeys(note for note in notes if note))


def _shown(each: Assignment) -> str:
    return f"{each.key}={compact(each.value)}"


def _names_of(each: Assignment) -> str:
    return ", ".join(each.origins)


def _values_of(v: PeerSettings, each: Assignment) -> Any:
    values = [v[key] for key in each.origins]
    return values[0] if values else None


def _origin(v: PeerSettings, each: Assignment) -> str:
    given = [f"{v.written[key]}={compact(v.given[key])}" for key in each.origins if key in v.given]
    if given:
        return f"{v.names.project}: {' '.join(given)}"
    return f"{v.names.project}'s default{': ' if each.origins else ''}" + " ".join(
        f"{key}={compact(v[key])}" for key in each.origins[:2]
    )
