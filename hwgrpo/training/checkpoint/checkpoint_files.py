"""A checkpoint's folder and files: their names, durable writes, and checksums."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hwgrpo.errors import CheckpointError
from hwgrpo.support.file_systems import sync
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.run_files import write_whole

MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
"""File with the manifest's checksum, in the format of `sha256sum --check`."""
_NAME = re.compile(r"step-(\d{8})")


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    """Return the folder of a step's unfinished checkpoint, while it is written or removed."""
    return root / f".step-{step:08d}.partial"


def folders(root: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint, oldest first."""
    if not root.is_dir():
        return []
    try:
        return sorted((step, path) for path in root.iterdir() if (step := step_of(path)) is not None)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error.strerror}; restore access to it") from error


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def rng_file(rank: int) -> str:
    """Return the name of a rank's file with random states."""
    return f"rng-rank{rank}.safetensors"


def share_file(rank: int) -> str:
    """Return the name of the file that marks a rank's files as written; a finished checkpoint has none."""
    return f"share-rank{rank}.json"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a safetensors file and fsync it; return its fingerprint."""
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)
    follow_umask(path)
    with open(path, "rb") as file:
        sync(file)
    return fingerprint(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a verified file.

    Raises:
        CheckpointError: the file cannot be read any more.
    """
    with reading(path):
        return load_file(path)


def checksum_line(manifest: bytes) -> str:
    """Return the content of the checksum file for a manifest's bytes."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a CheckpointError with the file's path if a verified file cannot be read any more in the block."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read any more: {error}; start again: the newest checkpoint that can be read is used"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file and fsync it; it appears under its name atomically."""
    write_whole(path, text)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def discard(path: Path) -> None:
    """Remove the file or folder at a path, if there is one."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # for a folder: Linux raises the first, other systems the second
        shutil.rmtree(path)


def remove(root: Path, step: int) -> None:
    """Remove a checkpoint; rename it first, so that a kill leaves no incomplete checkpoint under its name."""
    partial = partial_of(root, step)
    discard(partial)
    os.replace(folder_of(root, step), partial)
    discard(partial)
