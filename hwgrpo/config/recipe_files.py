"""Recipe files: where they are looked up, and their content; the presets of published methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.config.keys import apply_override, expand_names, leaf_keys, merge
from hwgrpo.config.schema import Settings
from hwgrpo.config.shipped_files import preset_files, recipe_files
from hwgrpo.config.yaml_text import MAX_BYTES, read_yaml
from hwgrpo.errors import ConfigError, nearest, shown
from hwgrpo.support.paths import check_path, with_home

_SUFFIXES = (".yaml", ".yml")


def settings_tree(recipe: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a recipe file, or of a mapping with nested or dotted keys; {} for None.

    Raises:
        ConfigError: there is no such file, or it cannot be read; a key of the mapping is not text.
    """
    if recipe is None:
        return {}
    if not isinstance(recipe, Mapping):
        return read_recipe(find_recipe(recipe))
    tree: dict[str, Any] = {}
    for key, value in recipe.items():
        if not isinstance(key, str):
            raise ConfigError(f"the settings have the key {shown(key)}; keys are text, e.g. 'trainer.max_steps'")
        apply_override(tree, key, _plain(value))
    return tree


def _plain(value: Any) -> Any:
    """Return a copy of a value as plain containers, with paths as text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe from its path or the name of a shipped one.

    `.yml` and `.yaml` are interchangeable where only one exists.

    Raises:
        ConfigError: there is no such file; the message lists the recipes that exist.
    """
    path = Path(with_home(str(recipe)))
    check_path(str(recipe), "recipe")
    shipped = recipe_files()
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


def read_recipe(path: Path) -> dict[str, Any]:
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
    loaded = read_yaml(text, str(path), Settings)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, e.g. `model: {{path: ...}}`")
    return expand_names(loaded)


def with_presets(recipe: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Return a recipe with the settings of the preset that it or an override names, and the keys of these settings.

    A recipe's own settings win over its preset. The last preset of the overrides, also null, takes the place of the
    recipe's, and wins over the recipe.
    """
    given = [value[0] for each in overrides if (value := _preset_named(*each))]
    preset = _preset_settings(
        given[-1] if given else next(iter(_preset_named("algorithm", recipe.get("algorithm"))), None)
    )
    merged = merge(recipe, preset) if given else merge(preset, recipe)
    return merged, {leaf for name, value in preset.items() for leaf in leaf_keys(value, name)}


def _preset_named(key: str, value: Any) -> tuple[Any, ...]:
    """Return the preset that a setting names, in a tuple; an empty one if it names none."""
    if key == "algorithm" and isinstance(value, Mapping) and "preset" in value:
        return (value["preset"],)
    return (value,) if key == "algorithm.preset" else ()


def _preset_settings(name: Any) -> dict[str, Any]:
    """Return the settings of a preset; none where there is none of that name, which is an error of the setting."""
    file = preset_files().get(name) if isinstance(name, str) else None
    return {} if file is None else read_recipe(file)


@dataclass(frozen=True)
class Preset:
    """A preset, for display."""

    name: str
    source: str
    """The method and its source."""
    settings: tuple[str, ...]
    """`key=value` of each setting, as an override."""


def presets() -> list[Preset]:
    """Return all presets."""
    return [
        Preset(name, _preset_comment(file), tuple(_preset_overrides(read_recipe(file))))
        for name, file in preset_files().items()
    ]


def _preset_comment(file: Path) -> str:
    return " ".join(line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))


def _preset_overrides(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _preset_overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={'null' if value is None else value}"
