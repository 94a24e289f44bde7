"""Checkpoints on disk: safetensors and a JSON manifest with checksums, verified before use.

A checkpoint folder `step-00000012` holds the trainable parameters and AdamW's moments as each rank holds them, the
random state of each rank, and `manifest.json`. `checkpoint_saver` writes it: it appears by one rename after everything
in it has reached the disk, so a kill at any instruction leaves either the whole of it or none. No pickles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hwgrpo.errors import CheckpointError
from hwgrpo.training import checkpoint_files as files
from hwgrpo.training import checkpoint_tensors
from hwgrpo.training.strategies.pieces import Piece, whole_pieces
from hwgrpo.training.strategies.strategy import Strategy

SCHEMA = "hwgrpo.checkpoint/2"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return int(self.manifest["step"])


def begin_after(root: Path, step: int) -> list[Path]:
    """Make a run's folder ready to go on after `step`: what lies beyond belongs to a branch that is left.

    Later checkpoints are set aside under another name, so that they are neither resumed from nor counted; unfinished
    ones are removed. Call it on one rank, before anything is saved.

    Returns:
        The folders that were set aside, under their new names.
    """
    aside = []
    for later, folder in files.folders(root):
        if later > step:
            target = folder.with_name(f"{folder.name}.abandoned")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            aside.append(target)
    if root.is_dir():
        for partial in root.glob(".step-*.partial"):
            shutil.rmtree(partial)
    return aside


def newest(root: Path, strategy: Strategy | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint whose files match its manifest, and what was wrong with any newer one.

    Args:
        root: folder of the run's checkpoints; it need not exist.
        strategy: as in `verify`; every rank gets the same answer.
    """
    problems: list[str] = []
    steps = [step for step, _ in files.folders(root)]
    if strategy is not None:
        steps = strategy.gather_objects(steps)[0]
    for step in reversed(steps):
        try:
            return verify(files.folder_of(root, step), strategy), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def newest_step(root: Path) -> int | None:
    """Return the step of the newest checkpoint, whose files are not read: it had a name only once it was whole."""
    return max((step for step, _ in files.folders(root)), default=None)


def verify(folder: Path, strategy: Strategy | None = None) -> Checkpoint:
    """Check a checkpoint's files against its manifest.

    Args:
        folder: of the checkpoint.
        strategy: shares the files out among its ranks, which all must call this; None: this process reads them all.

    Raises:
        CheckpointError: a file is missing, cut short or altered, or the manifest is not one of ours; with a strategy,
            told on all ranks.
    """
    manifest, problem = None, None
    rank, ranks = (0, 1) if strategy is None else (strategy.rank, strategy.world_size)
    try:
        manifest = _read_manifest(folder)
        for name in sorted(manifest["files"])[rank::ranks]:
            _check_file(folder / name, manifest)
    except CheckpointError as error:
        problem = error
    if strategy is not None:
        told = next(filter(None, strategy.gather_objects(str(problem) if problem else None)), None)
        problem = CheckpointError(told) if told else None
    if problem is not None:
        raise problem
    assert manifest is not None
    return Checkpoint(folder, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / files.MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint, it has no {files.MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or "schema" not in manifest:
        raise CheckpointError(f"{path} is damaged: it lacks what every manifest holds")
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(f"{path} has schema {manifest['schema']!r}; this version reads {SCHEMA}")
    kinds = {"step": int, "world_size": int, "state": dict, "parameters": dict, "files": dict}
    if not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path} is damaged: it lacks what every manifest holds")
    checkpoint_tensors.check_table(path, manifest["parameters"], manifest["files"])
    lacking = [rank for rank in range(manifest["world_size"]) if files.rng_file(rank) not in manifest["files"]]
    if lacking:
        raise CheckpointError(f"{path} is damaged: it names no {files.rng_file(lacking[0])}")
    return manifest


def _check_file(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        found = files.fingerprint(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != manifest["files"][path.name]:
        raise CheckpointError(f"{path} is damaged: its size or checksum differs from the manifest")
    checkpoint_tensors.check_file(path, manifest["parameters"])


def restore(checkpoint: Checkpoint, pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> None:
    """Put a checkpoint's parameters, and AdamW's moments where pieces have them, in place.

    Args:
        checkpoint: verified.
        pieces: what this rank holds.
        shapes: of the model's trainable parameters, by name.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    table = checkpoint.manifest["parameters"]
    checkpoint_tensors.check_parameters(checkpoint.folder, table, shapes)
    checkpoint_tensors.read(checkpoint.folder, table, pieces)


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put a checkpoint's parameters in place in a model that is in one piece.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    restore(checkpoint, whole_pieces(model), trainable_shapes(model))


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's trainable parameters, whole, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_rng(checkpoint: Checkpoint, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the random state of a rank, or None when the checkpoint was written by fewer ranks."""
    path = checkpoint.folder / files.rng_file(rank)
    return load_file(path) if path.is_file() else None
