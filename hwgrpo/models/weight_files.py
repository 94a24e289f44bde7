"""Whether the weight files of a model are complete, by their headers."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hwgrpo.errors import ConfigError
from hwgrpo.models.stored_dtype import read_header


def check_weight_files(path: str, folder: Path) -> None:
    """Check that every safetensors file of a model is there and has the length that its header states.

    Args:
        path: value of `model.path`.
        folder: the model's folder.

    Raises:
        ConfigError: a file is missing or truncated.
    """
    files = {*folder.glob("*.safetensors"), *indexed_files(folder)}
    for file in sorted(files):
        reason = _incomplete(file)
        if reason is not None:
            raise ConfigError(f"model.path={path!r}: {file.name} {reason}; copy or download it again")


def indexed_files(folder: Path) -> set[Path]:
    """Return the files that the index of a sharded model names."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return set()
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, LookupError, AttributeError):  # transformers reports it when it loads the model
        return set()
    return {folder / name for name in names if isinstance(name, str)}


def _incomplete(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, or None."""
    if not file.exists():
        return f"is missing, which {SAFE_WEIGHTS_INDEX_NAME} names"
    size = file.stat().st_size
    try:
        header = read_header(file)
    except ValueError:
        return f"has no complete header in its {size:,} bytes"
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
    stated = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return f"has {size:,} of {stated:,} bytes" if size < stated else None
