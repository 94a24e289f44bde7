"""Interpolations: `${...}` in values, resolved by OmegaConf."""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hwgrpo.config.document import entries
from hwgrpo.config.interpolation_bounds import check_interpolations
from hwgrpo.config.keys import INDEX, expand_names, merge
from hwgrpo.config.schema import Settings
from hwgrpo.config.typed import alternatives, build, hint_below
from hwgrpo.config.written_config import (
    Place,
    Written,
    dotted,
    interpolations,
    unresolved_error,
    value_at,
    without_unset,
)
from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, shown


def resolve_interpolations(raw: dict[str, Any], *, lenient: bool) -> tuple[dict[str, Any], dict[Place, Written]]:
    """Return the settings with every `${...}` resolved; it may name any setting, also one with a default.

    Args:
        raw: plain containers, not changed.
        lenient: leave out what needs a variable that is not set, where it may be secret.

    Returns:
        The settings, and the values left out.

    Raises:
        ConfigError: an interpolation names nothing that is there, or itself; the message shows no value that was read.
    """
    found = list(interpolations(raw, Settings))
    check_interpolations({place: text for place, text, _ in found}, raw)
    for place, text, _ in found:
        try:
            OmegaConf.create({"value": text})
        except OmegaConfBaseException as error:
            raise unresolved_error(place, text, error) from None
    if not found:
        return raw, {}
    settings = OmegaConf.create(merge(dataclasses.asdict(Settings()), raw))
    resolved = copy.deepcopy(raw)
    left_out = _leave_out_unset(settings, resolved, found) if lenient else {}
    for place, text, _ in found:
        if place not in left_out:
            try:
                value = _value_at(settings, place)
            except (OmegaConfBaseException, RecursionError) as error:
                raise unresolved_error(place, text, error) from None
            value_at(resolved, place[:-1])[place[-1]] = _parse_resolved(value, place, text)
    return expand_names(resolved), left_out


def _leave_out_unset(settings: Any, resolved: Any, found: Sequence[tuple[Place, str, bool]]) -> dict[Place, Written]:
    """Take what needs a variable that is not set, and may be secret, out of settings; also what refers to it changes.

    Args:
        settings: OmegaConf's, changed in place.
        resolved: plain containers of the same, changed in place.
        found: interpolations in them.
    """
    left_out: dict[Place, Written] = {}
    for place, text, free in found:
        try:
            _value_at(settings, place)
        except (OmegaConfBaseException, RecursionError) as error:
            without = without_unset(place, text, free, error)
            if without is None:
                continue  # another mistake, or it refers to one that is left out
            hint = _type_at(place)
            if without.value is None and typing.get_origin(hint) is dict:
                without = dataclasses.replace(without, value={})
            left_out[place] = without
            _parent(settings, place)[place[-1]] = without.value
            here = value_at(resolved, place[:-1])
            here[place[-1]] = without.value
            if without.value is None and hint is str:
                del here[place[-1]]
    return left_out


def _parse_resolved(value: Any, place: Place, written: str) -> Any:
    """Return the value of an interpolation, parsed as YAML unless the setting is text: variables contain text only.

    Raises:
        ConfigError: it has another type; the message shows it as it was written.
    """
    hint = _type_at(place)
    try:
        if isinstance(value, str) and not {str, Any} & {*alternatives(hint)}:
            value = read_yaml(value, "", hint)
        build(hint, value, "")
    except ConfigError:
        wanted = next((e.type for e in entries() if e.key == INDEX.sub("[]", dotted(place))), "another type")
        raise ConfigError(f"{dotted(place)}={shown(written)} has the wrong type; it must be {wanted}") from None
    return value


def _parent(settings: Any, place: Place) -> Any:
    return functools.reduce(lambda node, name: node[name], place[:-1], settings)


def _value_at(settings: Any, place: Place) -> Any:
    """Return a resolved value of OmegaConf's settings as plain containers."""
    value = _parent(settings, place)[place[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _type_at(place: Place) -> Any:
    """Return the type of the setting at a place."""
    return functools.reduce(lambda hint, name: hint_below(hint, str(name)), place, Settings)
