"""Recipe YAML and `key=value` overrides become one checked `Config`."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.config.interpolation import resolve_interpolations
from hwgrpo.config.keys import apply_override, check_keys, leaf_keys, parse_override
from hwgrpo.config.recipe_files import settings_tree, with_presets
from hwgrpo.config.schema import Settings
from hwgrpo.config.typed import build
from hwgrpo.config.uses import unused_settings
from hwgrpo.config.validate import check_config
from hwgrpo.config.written_config import (
    attach,
    dotted,
    overlaid,
    shown_settings,
    texts,
    written_of,
    written_values,
)
from hwgrpo.config.yaml_text import write_yaml
from hwgrpo.errors import ConfigError
from hwgrpo.support.text import HIDDEN, keys_in, remember_secrets
from hwgrpo.user_code import import_plugins

_GIVEN = "_given"
"""Attribute of a loaded configuration: the keys that were set. It is no setting."""


class Config(Settings):
    """The settings of one run."""

    @classmethod
    def load(cls, recipe: Any = None, overrides: Sequence[str] = ()) -> Config:
        """Return the checked settings of a recipe, or of a mapping, with `key=value` overrides; see `load_config`."""
        return load_config(recipe, overrides)


def load_config(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    *,
    data_may_be_missing: bool = False,
    files_may_be_missing: bool = False,
    variables_may_be_missing: bool = False,
    imported: Collection[str] = (),
    unread: Sequence[str] = (),
    used: Callable[[Config], Config] = lambda config: config,
) -> Config:
    """Load a recipe, apply overrides in order, check every value, and return the settings.

    Args:
        recipe: YAML file, name of a shipped recipe, or settings as a mapping; None starts from the defaults.
        overrides: `section.key=value` arguments; values are YAML. They win over the recipe; a setting of the recipe
            that has no effect beside them is noted on stderr.
        data_may_be_missing: do not insist on files with prompts that the settings name, nor on packages of loggers.
        files_may_be_missing: do not insist on any other file: the settings are those of another machine.
        variables_may_be_missing: where a value may be secret, do not insist on the variable it comes from; it is then
            null, and `unset_variables` names it.
        imported: settings or sections that the user did not choose; where nothing uses one, that is noted on stderr
            instead of refused.
        unread: sections and settings that are not used, whose names may be those of plug-ins that are not here.
        used: returns the settings that the command uses, with its own in place of the others; those are checked.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or a contradiction.
    """
    recipe_tree = settings_tree(recipe)
    overriding = [parse_override(override) for override in overrides]
    raw, of_presets = with_presets(recipe_tree, overriding)
    check_keys(raw, Config, "")
    used_before = used_settings(raw) - {key for key, _ in overriding} if overriding else set()
    for key, value in overriding:
        apply_override(raw, key, value)
    check_keys(raw, Config, "")
    config = resolved(raw, lenient=variables_may_be_missing)
    for place, text in texts(dataclasses.asdict(config)):
        if text == HIDDEN:
            raise ConfigError(f"{dotted(place)}={HIDDEN!r}: it was left out when these settings were printed; set it")
    import_plugins(config.plugins)
    imported = {*imported, *used_before, *of_presets}
    notes = check_config(
        used(config),
        data_may_be_missing=data_may_be_missing,
        files_may_be_missing=files_may_be_missing,
        imported=imported,
        unread=unread,
    )
    for note in notes:
        print(f"hwgrpo: note: {note}", file=sys.stderr)
    return config


def used_settings(recipe: Mapping[str, Any]) -> set[str]:
    """Return the keys of a recipe's settings that have an effect by themselves."""
    try:
        config = resolved(copy.deepcopy(dict(recipe)), lenient=True)
    except ConfigError:  # overrides have to mend it first
        return set()
    leaves = {leaf for name, value in recipe.items() for leaf in leaf_keys(value, name)}
    return leaves - unused_settings(config)


def to_yaml(config: Config, *, shown: bool = False) -> str:
    """Return the full configuration, defaults included, as YAML that `load_config` reads back.

    Values from variables that may be secret are written as interpolations, all others as resolved.

    Args:
        config: loaded settings.
        shown: for display: typed secrets are left out, too.
    """
    tree = to_tree(config)
    if shown:
        remember_secrets(keys_in(os.environ))
    return write_yaml(shown_settings(tree, Config) if shown else tree)


def to_tree(config: Config) -> dict[str, Any]:
    """Return a configuration as plain containers, with interpolations as they were written."""
    return overlaid(dataclasses.asdict(config), written_of(config))


def is_given(config: Config, key: str) -> bool:
    """Return whether a recipe, a preset or an override sets a single setting, if only to its default."""
    return key in vars(config).get(_GIVEN, ())


def unset_variables(config: Config) -> dict[str, str]:
    """Return the variables that are not set of settings that are null for that, by the settings' names."""
    return {dotted(place): each.unset for place, each in written_of(config).items() if each.unset is not None}


def resolved(raw: dict[str, Any], *, lenient: bool) -> Config:
    """Return settings with every interpolation resolved, and remember which values are stored as they were written."""
    values, left_out = resolve_interpolations(raw, lenient=lenient)
    config: Config = build(Config, values, "")
    attach(config, written_values(config, raw, Config, left_out), raw, Config)
    vars(config)[_GIVEN] = {leaf for name, value in raw.items() for leaf in leaf_keys(value, name)}
    return config
