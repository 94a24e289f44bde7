"""Recipe YAML and `key=value` overrides become one checked `Config`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hwgrpo.config.document import entries
from hwgrpo.config.fields import section_of
from hwgrpo.config.schema import Config
from hwgrpo.config.validate import check_config
from hwgrpo.config.written import (
    attach,
    dotted,
    first_unresolved,
    leave_unset_out,
    overlaid,
    place_of,
    shown_settings,
    texts,
    value_at,
    written_of,
    written_values,
)
from hwgrpo.errors import ConfigError, nearest
from hwgrpo.text import HIDDEN, is_secret

_PACKAGE = Path(__file__).resolve().parent.parent


def recipe_folders() -> tuple[Path, ...]:
    """Return the folders in which recipes are looked up by name: the wheel's, then the repository's."""
    return tuple(p for p in (_PACKAGE / "recipes", _PACKAGE.parent / "configs") if p.is_dir())


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe given as a path or by the name of one that ships with the package.

    Raises:
        ConfigError: there is no such file; the message lists the recipes that exist.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = {p.stem: p for folder in recipe_folders() for p in sorted(folder.glob("*.yaml"))}
    if path.stem in shipped and path.suffix in ("", ".yaml") and path.parent.name in ("", "configs"):
        return shipped[path.stem]
    near = nearest(path.stem, shipped)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(
        f"no recipe {str(recipe)!r}: there is no such file in {Path.cwd()}; recipes that ship: "
        f"{', '.join(sorted(shipped)) or 'none'}.{hint}"
    )


def load_config(
    recipe: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    data_may_be_missing: bool = False,
    variables_may_be_missing: bool = False,
    unread: Sequence[str] = (),
) -> Config:
    """Load a recipe, apply overrides in order, check every value, and return the settings.

    Args:
        recipe: YAML file or name of a shipped recipe; None starts from the defaults.
        overrides: `section.key=value` words; values are YAML. They win over the recipe.
        data_may_be_missing: do not insist on files with prompts that the settings name.
        variables_may_be_missing: where a value may be secret, do not insist on the variable it comes from; it is then
            null, and `unset_variables` names it.
        unread: sections and settings that are not used, whose names may be those of plug-ins that are not here.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or a contradiction.
    """
    given: DictConfig = _read_yaml(find_recipe(recipe)) if recipe is not None else OmegaConf.create({})
    _spell_out_reward_names(given)
    for word in overrides:
        key, value = _split_override(word)
        _check_key(key)
        try:
            OmegaConf.update(given, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"{_shown_override(word)} cannot be applied: {_first_line(error)}") from error
        _spell_out_reward_names(given)
    _check_tree(OmegaConf.to_container(given), Config, "")
    config = _resolved(given, lenient=variables_may_be_missing)
    for place, text in texts(dataclasses.asdict(config)):
        if text == HIDDEN:
            raise ConfigError(f"{dotted(place)}={HIDDEN!r}: it was left out when these settings were printed; set it")
    check_config(config, data_may_be_missing=data_may_be_missing, unread=unread)
    return config


def settings_from(saved: Mapping[str, Any] | str) -> Config:
    """Return the settings that a run has stored, unchecked: what they name may be gone, variables may be unset.

    Args:
        saved: the content of config.yaml, as text or as plain containers.

    Raises:
        ConfigError: it holds settings that this version does not have.
    """
    given: Any = saved  # of whose kinds each has an overload of its own
    return _resolved(OmegaConf.create(given), lenient=True)


def to_yaml(config: Config, *, shown: bool = False) -> str:
    """Return the full configuration, defaults included, as YAML that `load_config` reads back.

    What comes from variables and may be secret stands as it was written, every other value as what it was resolved to.

    Args:
        config: loaded settings.
        shown: it is for people to see: secrets that were typed are left out, too.
    """
    tree = overlaid(dataclasses.asdict(config), written_of(config))
    return OmegaConf.to_yaml(OmegaConf.create(shown_settings(tree, Config) if shown else tree))


def unset_variables(config: Config) -> dict[str, str]:
    """Return the variables that are not set of settings that are null for that, by the settings' names."""
    return {dotted(place): each.unset for place, each in written_of(config).items() if each.unset is not None}


def _resolved(given: DictConfig, *, lenient: bool) -> Config:
    """Merge settings with the schema's defaults and resolve every interpolation."""
    tree = OmegaConf.to_container(given)
    merged: DictConfig | None = None
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), given)  # type: ignore[assignment]
        assert merged is not None
        left_out = leave_unset_out(merged, tree, Config) if lenient else {}
        for key in sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(f"{key} is required and has no default; set it in the recipe or as {key}=...")
        config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        unresolved = None if merged is None else first_unresolved(merged, tree, Config)
        raise unresolved or _rephrase(error, tree) from error
    attach(config, written_values(config, tree, Config, left_out), tree, Config)
    return config


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}; a literal ${{ is written as \\${{") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, e.g. `model: {{path: ...}}`")
    return loaded


def _split_override(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not an override; write section.key=value, e.g. rollout.n=16")
    try:
        value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))  # interpolations unresolved
        return key, value["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{_shown_override(word)} is not valid YAML: {_first_line(error)}") from error


def _shown_override(word: str) -> str:
    """Return an override as a message may show it: without what is typed under the name of a secret."""
    key, _, text = word.partition("=")
    return f"{key}={HIDDEN if any(map(is_secret, key.split('.'))) else repr(text)}"


def _spell_out_reward_names(config: DictConfig) -> None:
    """An entry of reward.functions may be just a name: turn it into {name: ...}."""
    functions = OmegaConf.select(config, "reward.functions")
    if OmegaConf.is_list(functions):
        for i, entry in enumerate(functions):
            if isinstance(entry, str):
                functions[i] = {"name": entry}


def _check_key(dotted: str) -> None:
    """Refuse an override whose key the schema does not have, with the nearest key that it has."""
    here: type | None = Config
    walked: list[str] = []
    for part in dotted.split("."):
        if here is None:
            _check_below(dotted, ".".join(walked))
            return
        hints = typing.get_type_hints(here)
        if part.isdigit() and walked:
            walked.append(part)
            continue
        if part not in hints:
            raise _unknown_key(".".join([*walked, part]), here, ".".join(walked))
        walked.append(part)
        here = section_of(hints[part])


def _check_below(dotted: str, key: str) -> None:
    """Refuse to go below a setting that is neither a mapping nor a list."""
    entry = next((e for e in entries() if e.key == re.sub(r"\.\d+(?=\.|$)", "[]", key)), None)
    if entry is not None and not entry.type.startswith(("dict", "list")):
        raise ConfigError(f"unknown key {dotted}: {key} is a single setting ({entry.type}). Did you mean {key}=...?")


def _unknown_key(key: str, section: type, prefix: str) -> ConfigError:
    names = list(typing.get_type_hints(section))
    last = key.rsplit(".", 1)[-1]
    near = nearest(last, names)
    elsewhere = [e.key for e in entries() if e.key.rsplit(".", 1)[-1] == last]
    if len(elsewhere) == 1:  # trainer.lr can only have meant optim.lr
        near = elsewhere[0]
    elif near:
        near = f"{prefix}.{near}" if prefix else near
    hint = f" Did you mean {near}?" if near else ""
    where = f"{prefix} has" if prefix else "The sections are"
    return ConfigError(f"unknown key {key}.{hint} {where}: {', '.join(names)}.")


def _check_tree(values: Any, section: type, prefix: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix}={values!r} must be a mapping with the keys: {', '.join(_names(section))}")
    hints = typing.get_type_hints(section)
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if name not in hints:
            raise _unknown_key(key, section, prefix)
        inner = section_of(hints[name])
        if inner is None:
            continue
        if typing.get_origin(hints[name]) is list:
            if not isinstance(value, list):
                raise ConfigError(f"{key}={value!r} must be a list, e.g. {key}=[exact_match]")
            for i, element in enumerate(value):
                _check_tree(element, inner, f"{key}.{i}")
        else:
            _check_tree(value, inner, key)


def _names(section: type) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


def _rephrase(error: OmegaConfBaseException, tree: Any) -> ConfigError:
    key = getattr(error, "full_key", None) or "?"
    try:
        value = value_at(tree, place_of(key))  # as it was written: what a variable holds is not shown
    except (KeyError, IndexError, TypeError, AttributeError):
        value = None
    wanted = next((e.type for e in entries() if e.key == key), "another type")
    return ConfigError(f"{key}={value!r} has the wrong type; it must be {wanted}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
