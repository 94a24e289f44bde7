"""Recipe YAML and `key=value` overrides become one checked `Config`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hwgrpo.config.document import entries
from hwgrpo.config.peers import last_name_here, name_here
from hwgrpo.config.schema import Config
from hwgrpo.config.typed import alternatives, build, hint_below, is_list, section_of
from hwgrpo.config.uses import unused_settings
from hwgrpo.config.validate import check_config
from hwgrpo.config.written_config import (
    Place,
    Written,
    attach,
    dotted,
    interpolations,
    overlaid,
    shown_settings,
    texts,
    unresolved_error,
    value_at,
    without_unset,
    written_of,
    written_values,
)
from hwgrpo.config.yaml_text import MAX_BYTES, read_yaml
from hwgrpo.errors import ConfigError, nearest, shown
from hwgrpo.paths import check_path
from hwgrpo.text import HIDDEN, is_secret
from hwgrpo.user_code import import_plugins

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml")
_INDEX = re.compile(r"\.\d+(?=\.|$)")
_OVERRIDE = "write section.key=value, e.g. rollout.n=16"


def recipe_folders() -> tuple[Path, ...]:
    """Return the folders in which recipes are looked up by name: the wheel's, then the repository's."""
    return tuple(p for p in (_PACKAGE / "recipes", _PACKAGE.parent / "configs") if p.is_dir())


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe given as a path or by the name of one that ships with the package.

    `.yml` and `.yaml` stand for each other where only one of them is there.

    Raises:
        ConfigError: there is no such file; the message lists the recipes that exist.
    """
    path = Path(recipe)
    check_path(str(recipe), "recipe")
    shipped = {p.stem: p for folder in recipe_folders() for p in sorted(folder.glob("*.yaml"))}
    for file in (path, *(path.with_suffix(other) for other in _SUFFIXES if path.suffix in _SUFFIXES)):
        if file.is_file():
            return file
    if path.stem in shipped and path.suffix in ("", *_SUFFIXES) and path.parent.name in ("", "configs"):
        return shipped[path.stem]
    if path.is_dir():
        raise ConfigError(f"no recipe {str(recipe)!r}: that is a folder; name the YAML file in it")
    near = nearest(path.stem, shipped)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(
        f"no recipe {shown(str(recipe))}: there is no such file in {Path.cwd()}; recipes that ship: "
        f"{', '.join(sorted(shipped)) or 'none'}.{hint}"
    )


def load_config(
    recipe: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    data_may_be_missing: bool = False,
    variables_may_be_missing: bool = False,
    imported: Collection[str] = (),
    unread: Sequence[str] = (),
) -> Config:
    """Load a recipe, apply overrides in order, check every value, and return the settings.

    Args:
        recipe: YAML file or name of a shipped recipe; None starts from the defaults.
        overrides: `section.key=value` arguments; values are YAML. They win over the recipe; a setting of the recipe
            that has no effect beside them is noted on stderr.
        data_may_be_missing: do not insist on files with prompts that the settings name.
        variables_may_be_missing: where a value may be secret, do not insist on the variable it comes from; it is then
            null, and `unset_variables` names it.
        imported: settings or sections that the user did not choose; where nothing uses one, that is noted on stderr
            instead of refused.
        unread: sections and settings that are not used, whose names may be those of plug-ins that are not here.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or a contradiction.
    """
    given = _read_recipe(find_recipe(recipe)) if recipe is not None else {}
    _check_names(given, Config, "")
    overriding = [_split_override(override) for override in overrides]
    used_before = _used_settings(given) - {key for key, _ in overriding} if overriding else set()
    for key, value in overriding:
        _apply(given, key, value)
    _check_names(given, Config, "")
    config = _resolved(given, lenient=variables_may_be_missing)
    for place, text in texts(dataclasses.asdict(config)):
        if text == HIDDEN:
            raise ConfigError(f"{dotted(place)}={HIDDEN!r}: it was left out when these settings were printed; set it")
    import_plugins(config.plugins)
    notes = check_config(
        config, data_may_be_missing=data_may_be_missing, imported={*imported, *used_before}, unread=unread
    )
    for note in notes:
        print(f"hwgrpo: note: {note}", file=sys.stderr)
    return config


def _used_settings(recipe: Mapping[str, Any]) -> set[str]:
    """Return the keys of a recipe's settings that have an effect by themselves."""
    try:
        config = _resolved(copy.deepcopy(dict(recipe)), lenient=True)
    except ConfigError:  # overrides have to mend it first
        return set()
    leaves = {leaf for name, value in recipe.items() for leaf in _leaves(value, name)}
    return leaves - unused_settings(config)


def settings_from(saved: Mapping[str, Any] | str) -> Config:
    """Return the settings that a run has stored, unchecked: what they name may be gone, variables may be unset.

    Args:
        saved: the content of config.yaml, as text or as plain containers.

    Raises:
        ConfigError: it holds settings that this version does not have.
    """
    given = read_yaml(saved, "config.yaml", Config) if isinstance(saved, str) else copy.deepcopy(dict(saved))
    given = _spelled_out(given or {})
    _check_names(given, Config, "")
    return _resolved(given, lenient=True)


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


def _resolved(given: dict[str, Any], *, lenient: bool) -> Config:
    """Return settings with every interpolation resolved, and remember which values are stored as they were written."""
    values, left_out = _interpolated(given, lenient=lenient)
    config: Config = build(Config, values, "")
    attach(config, written_values(config, given, Config, left_out), given, Config)
    return config


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: the recipe cannot be read: {error.strerror}; check the file and its rights"
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes, which no recipe is; name the YAML file of a run")
    loaded = read_yaml(text, str(path), Config)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, e.g. `model: {{path: ...}}`")
    return _spelled_out(loaded)


def _split_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if key.startswith("~"):
        raise ConfigError(
            f"{shown(override)} deletes a setting, which is not possible; {_OVERRIDE}, with the default or null"
        )
    if not equals or not key:
        raise ConfigError(f"{shown(override)} is not an override; {_OVERRIDE}")
    hint = _hint_of(key)
    return key, read_yaml(text, _shown_override(key, text), hint)


def _shown_override(key: str, text: str) -> str:
    """Return an override as a message may show it: without what is typed under the name of a secret."""
    return f"{key}={HIDDEN if any(map(is_secret, key.split('.'))) else shown(text)}"


def _spelled_out(given: dict[str, Any]) -> dict[str, Any]:
    """Turn each entry of reward.functions that is just a name into {name: ...}."""
    reward = given.get("reward")
    functions = reward.get("functions") if isinstance(reward, dict) else None
    if isinstance(functions, list):
        functions[:] = [{"name": entry} if isinstance(entry, str) else entry for entry in functions]
    return given


def _apply(given: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is merged into the one that is there, a list replaces it.

    An index goes into the list that is there, or else into the default.
    """
    *parents, last = key.split(".")
    here: Any = given
    hint: Any = Config
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
            here[slot] = _merged(old, value)
    _spelled_out(given)


def _default_list(section: Any, name: str) -> list[Any]:
    field = next(f for f in dataclasses.fields(section) if f.name == name)
    if field.default_factory is dataclasses.MISSING:
        return []  # required, or text by default
    return [dataclasses.asdict(e) if dataclasses.is_dataclass(e) else e for e in field.default_factory()]  # type: ignore[arg-type]


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
    return new


def _interpolated(given: dict[str, Any], *, lenient: bool) -> tuple[dict[str, Any], dict[Place, Written]]:
    """Return the settings with every `${...}` resolved; it may name any setting, also one with a default.

    Args:
        given: plain containers, left as they are.
        lenient: leave out what needs a variable that is not set, where it may be secret.

    Returns:
        The settings, and what was left out.

    Raises:
        ConfigError: an interpolation names nothing that is there, or itself; the message shows no value that was read.
    """
    found = list(interpolations(given, Config))
    for place, text, _ in found:
        try:
            OmegaConf.create({"value": text})
        except OmegaConfBaseException as error:
            raise unresolved_error(place, text, error) from None
    if not found:
        return given, {}
    settings = OmegaConf.create(_merged(dataclasses.asdict(Config()), given))
    resolved = copy.deepcopy(given)
    left_out = _leave_unset_out(settings, resolved, found) if lenient else {}
    for place, text, _ in found:
        if place not in left_out:
            try:
                value = _value_at(settings, place)
            except (OmegaConfBaseException, RecursionError) as error:
                raise unresolved_error(place, text, error) from None
            value_at(resolved, place[:-1])[place[-1]] = _typed(value, place, text)
    return _spelled_out(resolved), left_out


def _leave_unset_out(settings: Any, resolved: Any, found: Sequence[tuple[Place, str, bool]]) -> dict[Place, Written]:
    """Take what needs a variable that is not set, and may be secret, out of settings; also what refers to it changes.

    Args:
        settings: OmegaConf's, changed in place.
        resolved: plain containers of the same, changed in place.
        found: the interpolations in them.
    """
    left_out: dict[Place, Written] = {}
    for place, text, free in found:
        try:
            _value_at(settings, place)
        except (OmegaConfBaseException, RecursionError) as error:
            without = without_unset(place, text, free, error)
            if without is None:
                continue  # another mistake, or it refers to one that is left out
            hint = _hint_at(place)
            if without.value is None and typing.get_origin(hint) is dict:
                without = dataclasses.replace(without, value={})
            left_out[place] = without
            _parent(settings, place)[place[-1]] = without.value
            here = value_at(resolved, place[:-1])
            here[place[-1]] = without.value
            if without.value is None and hint is str:
                del here[place[-1]]
    return left_out


def _parent(settings: Any, place: Place) -> Any:
    return functools.reduce(lambda node, name: node[name], place[:-1], settings)


def _value_at(settings: Any, place: Place) -> Any:
    """Return a resolved value of OmegaConf's settings as plain containers."""
    value = _parent(settings, place)[place[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _hint_at(place: Place) -> Any:
    """Return the type of the setting at a place."""
    return functools.reduce(lambda hint, name: hint_below(hint, str(name)), place, Config)


def _typed(value: Any, place: Place, written: str) -> Any:
    """Return what an interpolation gave, read as YAML where the setting is no text: variables hold text only.

    Raises:
        ConfigError: it has another type; the message shows it as it was written.
    """
    hint = _hint_at(place)
    try:
        if isinstance(value, str) and not {str, Any} & {*alternatives(hint)}:
            value = read_yaml(value, "", hint)
        build(hint, value, "")
    except ConfigError:
        wanted = next((e.type for e in entries() if e.key == _INDEX.sub("[]", dotted(place))), "another type")
        raise ConfigError(f"{dotted(place)}={shown(written)} has the wrong type; it must be {wanted}") from None
    return value


def _hint_of(dotted: str) -> Any:
    """Return the type of the setting that an override's key names.

    Raises:
        ConfigError: the schema has no such key; the message names the nearest that it has.
    """
    hint: Any = Config
    walked: list[str] = []
    for name in dotted.split("."):
        section = section_of(hint)
        prefix = ".".join(walked)
        if is_list(hint):
            if not _is_index(name):
                raise ConfigError(
                    f"unknown key {_shown_key(dotted)}: {prefix} is a list, so a number comes after it: "
                    f"{prefix}.0{'.' + name if section and name in _names(section) else ''}=..."
                )
        elif section is not None:
            if name not in _names(section):
                raise _unknown_key(".".join([*walked, name]), section, prefix, dotted)
        elif not any(typing.get_origin(kind) is dict for kind in alternatives(hint)) and hint is not Any:
            entry = next(e for e in entries() if e.key == _INDEX.sub("[]", prefix))
            raise ConfigError(
                f"unknown key {_shown_key(dotted)}: {prefix} is a single setting ({entry.type}). "
                f"Did you mean {prefix}=...?"
            )
        hint = hint_below(hint, name)
        walked.append(name)
    return hint


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _unknown_key(key: str, section: type, prefix: str, full: str | None = None) -> ConfigError:
    """Return the error for a key that the schema does not have.

    Args:
        key: as far as it was followed.
        section: what it should be in.
        prefix: the key of that section.
        full: the key as it was written, which may name another system's setting.
    """
    if (here := name_here(full or key)) is not None:
        return ConfigError(f"unknown key {_shown_key(full or key)}: {here}")
    names = _names(section)
    last = key.rsplit(".", 1)[-1]
    near = nearest(last, names) or nearest(last.lower(), names)
    elsewhere = [e.key for e in entries() if e.key.rsplit(".", 1)[-1] == last]
    if len(elsewhere) == 1:  # trainer.lr can only have meant optim.lr
        near = elsewhere[0]
    elif near:
        near = f"{prefix}.{near}" if prefix else near
    if not near and (here := last_name_here(full or key)) is not None:
        return ConfigError(f"unknown key {_shown_key(full or key)}: {here}")
    hint = f" Did you mean {near}?" if near else ""
    where = f"{prefix} has" if prefix else "The sections are"
    return ConfigError(f"unknown key {_shown_key(key)}.{hint} {where}: {', '.join(names)}.")


def _shown_key(key: str) -> str:
    return key if key.isprintable() and 0 < len(key) <= 120 else shown(key)


def _check_names(values: Any, hint: Any, prefix: str) -> None:
    """Check that the schema has every key of a recipe; types are for `build`.

    Raises:
        ConfigError: the first key that it does not have.
    """
    section = section_of(hint)
    if isinstance(values, list) and section is not None:
        for i, element in enumerate(values):
            _check_names(element, section, f"{prefix}.{i}")
    if not isinstance(values, Mapping) or section is None or is_list(hint):
        return
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if name not in _names(section):
            raise _unknown_key(key, section, prefix, next(_leaves(value, key)))
        _check_names(value, hint_below(section, name), key)


def _leaves(value: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of all single values below `value`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    else:
        yield key


def _names(section: type) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
