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

KEY = "algorithm.preset"


def with_presets(recipe: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Return a recipe with the settings of the presets that it and overrides name, and the keys of these settings.

    A recipe's own settings win over its preset; an override's preset wins over the recipe.
    """
    section = recipe.get("algorithm")
    own = _settings_of(section.get("preset") if isinstance(section, dict) else None)
    given = [_settings_of(value) for key, value in overrides if key == KEY]
    merged = merge(own, recipe)
    for preset in given:
        merged = merge(merged, preset)
    return merged, {
        leaf for preset in (own, *given) for name, value in preset.items() for leaf in leaf_keys(value, name)
    }


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
