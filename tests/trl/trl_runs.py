"""Imports of TRL's settings for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hwgrpo.config import Config, load_config
from hwgrpo.migrate.imports.import_result import Imported
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_reader import read_trl

BASE = ("model_name_or_path=Qwen/Qwen2.5-7B-Instruct", "dataset_name=train.jsonl", "reward_funcs=accuracy_reward")


def imported(*settings: str, base: tuple[str, ...] = BASE, environment: Mapping[str, str] | None = None) -> Imported:
    """Import settings on top of `base`."""
    read, _ = read_trl(None, [*base, *settings], environment or {})
    return import_trl(read)


def config_of(result: Imported, folder: Path, *overrides: str) -> Config:
    """Load the recipe of an import."""
    file = folder / "imported.yaml"
    file.write_text(recipe_text(result, "a test"))
    return load_config(file, overrides, data_may_be_missing=True)
