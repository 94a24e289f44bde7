"""Recipes and presets that ship with hwgrpo."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def recipe_folders() -> tuple[Path, ...]:
    """Return the folders in which recipes are looked up by name: the wheel's, then the repository's."""
    return tuple(p for p in (_PACKAGE / "recipes", _PACKAGE.parent / "configs") if p.is_dir())


def recipe_files() -> dict[str, Path]:
    """Return the file of each recipe that ships by its name."""
    return {file.stem: file for folder in recipe_folders() for file in sorted(folder.glob("*.yaml"))}


def preset_files() -> dict[str, Path]:
    """Return the file of each preset by its name."""
    return {file.stem: file for folder in recipe_folders() for file in sorted((folder / "presets").glob("*.yaml"))}


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(preset_files())
