"""Recipe YAML and `key=value` overrides become one checked `Config`."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hwgrpo.config.document import entries
from hwgrpo.config.schema import Config
from hwgrpo.config.validate import check_config
from hwgrpo.errors import ConfigError, nearest

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
    recipe: str | Path | None, overrides: Sequence[str] = (), *, data_may_be_missing: bool = False
) -> Config:
    """Load a recipe, apply overrides in order, check every value, and return the settings.

    Args:
        recipe: YAML file or name of a shipped recipe; None starts from the defaults.
        overrides: `section.key=value` words; values are YAML. They win over the recipe.
        data_may_be_missing: do not insist on files with prompts that the settings name.

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
            raise ConfigError(f"{word!r} cannot be applied: {_first_line(error)}") from error
        _spell_out_reward_names(given)
    _check_tree(OmegaConf.to_container(given), Config, "")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), given)
        for key in sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(f"{key} is required and has no default; set it in the recipe or as {key}=...")
        config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise _rephrase(error, given) from error
    check_config(config, data_may_be_missing=data_may_be_missing)
    return config


def to_yaml(config: Config) -> str:
    """Return the whole configuration, defaults included, as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
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
        return key, OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}={text!r} is not valid YAML: {_first_line(error)}") from error


def _spell_out_reward_names(config: DictConfig) -> None:
    """An entry of reward.functions may be just a name: turn it into {name: ...}."""
    functions = OmegaConf.select(config, "reward.functions")
    if OmegaConf.is_list(functions):
        for i, entry in enumerate(functions):
            if isinstance(entry, str):
                functions[i] = {"name": entry}


def _section(annotation: Any) -> type | None:
    """Return the dataclass behind a type hint: itself, or the element of a list of them."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return annotation
    if typing.get_origin(annotation) is list:
        return _section(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((s for s in map(_section, typing.get_args(annotation)) if s), None)
    return None


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
        here = _section(hints[part])


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
        inner = _section(hints[name])
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


def _rephrase(error: OmegaConfBaseException, given: DictConfig) -> ConfigError:
    key = getattr(error, "full_key", None) or "?"
    value = OmegaConf.select(given, key, throw_on_missing=False) if key != "?" else None
    wanted = next((e.type for e in entries() if e.key == key), "another type")
    return ConfigError(f"{key}={value!r} has the wrong type; it must be {wanted}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
