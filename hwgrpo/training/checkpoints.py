"""Checkpoints: safetensors and a JSON manifest with checksums, written atomically, verified before use.

A checkpoint folder `step-00000012` holds the trainable parameters and AdamW's moments as each rank holds them, the
random state of each rank, and `manifest.json`. It appears by one rename after everything in it has reached the disk, so
a kill at any instruction leaves either the whole of it or none. No pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hwgrpo.errors import CheckpointError
from hwgrpo.training import checkpoint_tensors
from hwgrpo.training.strategies.pieces import Piece, whole_pieces
from hwgrpo.training.strategies.strategy import Strategy

SCHEMA = "hwgrpo.checkpoint/2"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return int(self.manifest["step"])


def save(
    root: Path,
    step: int,
    *,
    rng: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    strategy: Strategy,
    keep: int,
) -> Path:
    """Write a checkpoint and drop all but the newest `keep`.

    Args:
        root: folder of the run's checkpoints, which all ranks see.
        step: the last finished step.
        rng: this rank's random state, name -> uint8 tensor.
        state: JSON-able rest (sampler position, updates done, ...), equal on all ranks.
        strategy: holds parameters and moments; each rank writes a part of them.
        keep: how many checkpoints stay.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: a rank cannot write, told on all of them. Earlier checkpoints are as they were.
    """
    final = root / f"step-{step:08d}"
    partial = root / f".step-{step:08d}.partial"
    if strategy.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    strategy.barrier()
    pieces = strategy.owned_pieces()
    files = {f"rng-rank{strategy.rank}.safetensors": dict(rng)} | checkpoint_tensors.files_of(pieces, strategy.rank)
    fingerprints, error = {}, None
    try:
        for name, tensors in files.items():
            _write(partial / name, tensors)
            fingerprints[name] = _fingerprint(partial / name)
    except (OSError, SafetensorError) as failure:
        error = str(failure)
    written = strategy.gather_objects((fingerprints, checkpoint_tensors.table_of(pieces, strategy.rank), error))
    for rank, (_, _, failure) in enumerate(written):
        if failure is not None:
            raise OSError(failure if strategy.world_size == 1 else f"rank {rank}: {failure}")
    if strategy.rank == 0:
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "world_size": strategy.world_size,
            "torch": torch.__version__,
            "state": dict(state),
            "parameters": checkpoint_tensors.merged([table for _, table, _ in written]),
            "files": {name: entry for entries, _, _ in written for name, entry in entries.items()},
        }
        _write_text(partial / "manifest.json", json.dumps(manifest, indent=1))
        _sync_folder(partial)
        shutil.rmtree(final, ignore_errors=True)  # there only when a step that is saved already is saved again
        os.replace(partial, final)
        _sync_folder(root)
        for _, old in sorted(_folders(root))[:-keep]:
            shutil.rmtree(old)
    strategy.barrier()
    return final


def begin_after(root: Path, step: int) -> list[Path]:
    """Make a run's folder ready to go on after `step`: what lies beyond belongs to a branch that is left.

    Later checkpoints are set aside under another name, so that they are neither resumed from nor counted; unfinished
    ones are removed. Call it on one rank, before anything is saved.

    Returns:
        The folders that were set aside, under their new names.
    """
    aside = []
    for later, folder in sorted(_folders(root)):
        if later > step:
            target = folder.with_name(f"{folder.name}.abandoned")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            aside.append(target)
    if root.is_dir():
        for partial in root.glob(".step-*.partial"):
            shutil.rmtree(partial)
    return aside


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint whose files match its manifest, and what was wrong with any newer one.

    Args:
        root: folder of the run's checkpoints; it need not exist.
    """
    problems: list[str] = []
    for _, folder in sorted(_folders(root), reverse=True):
        try:
            return verify(folder), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def verify(folder: Path) -> Checkpoint:
    """Check a checkpoint's files against its manifest.

    Raises:
        CheckpointError: a file is missing, cut short or altered, or the manifest is not one of ours.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint, it has no manifest.json") from error
    except ValueError as error:
        raise CheckpointError(f"{folder}/manifest.json is damaged: {error}") from error
    if not isinstance(manifest, dict) or not {"schema", "step", "state", "files"} <= manifest.keys():
        raise CheckpointError(f"{folder}/manifest.json is damaged: it lacks what every manifest holds")
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(f"{folder}/manifest.json has schema {manifest['schema']!r}; this version reads {SCHEMA}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if _fingerprint(path) != expected:
            raise CheckpointError(f"{path} is damaged: its size or checksum differs from the manifest")
    return Checkpoint(folder, manifest)


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
    path = checkpoint.folder / f"rng-rank{rank}.safetensors"
    return load_file(path) if path.is_file() else None


def _folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [(int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name))]


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
