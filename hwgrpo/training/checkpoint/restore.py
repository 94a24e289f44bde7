"""Checkpoints on disk: safetensors and a JSON manifest with checksums, verified before use.

A checkpoint folder `step-00000012` holds the trainable parameters and AdamW's moments as each rank holds them, the
random state of each rank, and `manifest.json`. `checkpoint_saver` writes it: it appears by one rename after everything
in it has reached the disk, so a kill at any instruction leaves either the whole of it or none. No pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hwgrpo.errors import CheckpointError
from hwgrpo.training.checkpoint import checkpoint_files, shard_files
from hwgrpo.training.checkpoint import manifest as checkpoint_manifest
from hwgrpo.training.strategies.param_shard import ParamShard, full_param_shards
from hwgrpo.training.strategies.strategy import Strategy


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    manifest: Mapping[str, Any]
    note: str | None = None
    """What the user should know of it: its manifest has no checksum."""

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return int(self.manifest["step"])


def set_aside_later(root: Path, step: int) -> list[Path]:
    """Make a run's folder ready to go on after `step`: what lies beyond belongs to a branch that is left.

    Later checkpoints are set aside under another name, so that they are neither resumed from nor counted; unfinished
    ones are removed. Call it on one rank, before anything is saved.

    Returns:
        The folders that were set aside, under their new names.
    """
    aside = []
    for later, folder in checkpoint_files.folders(root):
        if later > step:
            target = folder.with_name(f"{folder.name}.abandoned")
            checkpoint_files.discard(target)
            folder.rename(target)
            aside.append(target)
    if root.is_dir():
        for partial in root.glob(".step-*.partial"):
            checkpoint_files.discard(partial)
    return aside


def newest(root: Path, strategy: Strategy | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint whose files match its manifest, and what was wrong with any newer one.

    Args:
        root: folder of the run's checkpoints; it need not exist.
        strategy: as in `verify`; every rank gets the same answer.
    """
    problems: list[str] = []
    steps = [step for step, _ in checkpoint_files.folders(root)]
    if strategy is not None:
        steps = strategy.gather_objects(steps)[0]
    for step in reversed(steps):
        try:
            return verify(checkpoint_files.folder_of(root, step), strategy), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def newest_step(root: Path) -> int | None:
    """Return the step of the newest checkpoint, whose files are not read: it had a name only once it was whole."""
    return max((step for step, _ in checkpoint_files.folders(root)), default=None)


def verify(folder: Path, strategy: Strategy | None = None) -> Checkpoint:
    """Check a checkpoint's files against its manifest.

    Args:
        folder: of the checkpoint.
        strategy: shares the files out among its ranks, which all must call this; None: this process reads them all.

    Raises:
        CheckpointError: a file is missing, cut short or altered, the manifest is not one of ours, or ranks read
            different manifests; with a strategy, raised on all ranks.
    """
    manifest, problem = None, None
    rank, ranks = (0, 1) if strategy is None else (strategy.rank, strategy.world_size)
    try:
        manifest = checkpoint_manifest.read(folder)
        for name in sorted(manifest.content["files"])[rank::ranks]:
            _check_file(folder / name, manifest.content)
    except CheckpointError as error:
        problem = str(error)
    if strategy is not None:
        problem = _first_problem(folder, strategy.gather_objects((problem, manifest and manifest.sha256)))
    if problem is not None:
        raise CheckpointError(problem)
    assert manifest is not None
    return Checkpoint(folder, manifest.content, manifest.note)


def _first_problem(folder: Path, found: Sequence[tuple[str | None, str | None]]) -> str | None:
    """Return what is wrong with a checkpoint by what each rank found: its problem, and its manifest's checksum."""
    for problem, _ in found:
        if problem is not None:
            return problem
    for rank, (_, sha256) in enumerate(found):
        if sha256 != found[0][1]:
            return f"{folder / checkpoint_files.MANIFEST}: rank {rank} reads another content than rank 0"
    return None


def _check_file(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        found = checkpoint_files.fingerprint(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != manifest["files"][path.name]:
        raise CheckpointError(f"{path} is damaged: its size or checksum differs from the manifest")
    shard_files.check_file(path, manifest["parameters"])


def restore(checkpoint: Checkpoint, shards: Sequence[ParamShard], shapes: Mapping[str, Sequence[int]]) -> None:
    """Put a checkpoint's parameters, and AdamW's moments where shards have them, in place.

    Args:
        checkpoint: verified.
        shards: what this rank holds.
        shapes: of the model's trainable parameters, by name.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    table = checkpoint.manifest["parameters"]
    shard_files.check_parameters(checkpoint.folder, table, shapes)
    shard_files.read(checkpoint.folder, table, shards)


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put a checkpoint's parameters in place in a model that is in one shard.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    restore(checkpoint, full_param_shards(model), trainable_shapes(model))


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's trainable parameters, whole, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_rng(checkpoint: Checkpoint, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the random state of a rank, or None when the checkpoint was written by fewer ranks.

    Raises:
        CheckpointError: its file cannot be read any more.
    """
    name = checkpoint_files.rng_file(rank)
    return checkpoint_files.read_tensors(checkpoint.folder / name) if name in checkpoint.manifest["files"] else None
