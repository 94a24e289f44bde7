"""Built-in models that `fetch_all` makes before the tests; without it each worker that needs one at once makes it."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

MADE = Path(__file__).resolve().parents[3] / "build" / "builtin_models"
ADDRESSES = tuple(f"builtin://tiny?task=sort{more}" for more in ("", "&seed=1", "&head=32"))
"""Models of many tests; making one takes longer than most trainings on it."""


def make() -> Path:
    """Make the models and return their cache."""
    from hwgrpo.models.loading import resolve_model_path

    shutil.rmtree(MADE, ignore_errors=True)  # those of older code
    with patch.dict(os.environ, HWGRPO_CACHE=str(MADE)):
        for address in ADDRESSES:
            resolve_model_path(address)
    return MADE


def link_into(cache: Path) -> None:
    """Let a cache have what was made; a model's name is a hash of its options, task and code."""
    (cache / "builtin").mkdir(parents=True, exist_ok=True)
    for model in MADE.glob("builtin/tiny-*"):
        with suppress(FileExistsError):  # another worker's
            (cache / "builtin" / model.name).symlink_to(model)
