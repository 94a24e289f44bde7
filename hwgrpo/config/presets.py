"""Presets: the settings of a published method by its name, one YAML file each, whose comment names the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.config.keys import leaf_keys
from hwgrpo.config.overrides import merge
from hwgrpo.config.recipe_files import read_recipe
from hwgrpo.config.shipped_files import preset_files


def with_presets(recipe: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Return a recipe with the settings of the preset that it or an override names, and the keys of these settings.

    A recipe's own settings win over its preset. The last preset of the overrides, also null, takes the place of the
    recipe's, and wins over the recipe.
    """
    given = [value[0] for each in overrides if (value := _named(*each))]
    preset = _settings_of(given[-1] if given else next(iter(_named("algorithm", recipe.get("algorithm"))), None))
    merged = merge(recipe, preset) if given else merge(preset, recipe)
    return merged, {leaf for name, value in preset.items() for leaf in leaf_keys(value, name)}


def _named(key: str, value: Any) -> tuple[Any, ...]:
    """Return the preset that a setting names, in a tuple; an empty one if it names none."""
    if key == "algorithm" and isinstance(value, Mapping) and "preset" in value:
        return (value["preset"],)
    return (value,) if key == "algorithm.preset" else ()


def _settings_of(name: Any) -> dict[str, Any]:
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
        Preset(name, _comment_of(file), tuple(_overrides(read_recipe(file)))) for name, file in preset_files().items()
    ]


def _comment_of(file: Path) -> str:
    return " ".join(line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))


def _overrides(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={'null' if value is None else value}"
