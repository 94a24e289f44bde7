"""Imports of verl's settings for tests."""

from __future__ import annotations

from pathlib import Path

from hwgrpo.config import Config, load_config
from hwgrpo.migrate.imports.import_result import Imported
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.verl_import import import_verl
from hwgrpo.migrate.imports.verl_reader import read_verl

BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.rollout.n=4",
)
"""The settings without which verl's GRPO does not start, and a validation."""


def imported(*overrides: str, base: tuple[str, ...] = BASE) -> Imported:
    """Import overrides on top of `base`."""
    settings, _ = read_verl(None, [*base, *overrides], {"HOME": "/home/me", "USER": "me"})
    return import_verl(settings)


def config_of(result: Imported, folder: Path, *overrides: str) -> Config:
    """Load the recipe of an import."""
    file = folder / "imported.yaml"
    file.write_text(recipe_text(result, "a test"))
    return load_config(file, overrides, data_may_be_missing=True)
