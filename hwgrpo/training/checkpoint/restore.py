"""Loading checkpoints: safetensors and a JSON manifest with checksums, verified before use.

A checkpoint folder `step-00000012` has each rank's shards of trainable parameters and optimizer states, each rank's
random state, and `manifest.json`. `saver.py` writes it: it appears by one rename after all its files are on the disk,
so a kill at any instruction leaves a complete checkpoint or none. No pickles.
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
    """Note for the user: its manifest has no checksum."""

    @property
    def step(self) -> int:
        """The last step in it."""
        return int(self.manifest["step"])


def set_aside_later(root: Path, step: int) -> list[Path]:
    """Rename checkpoints later than `step`, which belong to an abandoned branch; remove unfinished ones.

    Renamed checkpoints are neither resumed from nor counted. Call it on one rank, before the first save.

    Returns:
        The renamed folders, under their new names.
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
        strategy: as in `verify`; the result is the same on all ranks.
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
    """Return the step of the newest checkpoint, without verifying it: its name shows that it was completed."""
    return max((step for step, _ in checkpoint_files.folders(root)), default=None)


def verify(folder: Path, strategy: Strategy | None = None) -> Checkpoint:
    """Check a checkpoint's files against its manifest.

    Args:
        folder: folder of the checkpoint.
        strategy: distributes the files over its ranks, which all must call this; None: this process reads them all.

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


def _first_problem(folder: Path, results: Sequence[tuple[str | None, str | None]]) -> str | None:
    """Return the first problem in the ranks' results: (problem, checksum of the manifest) of each."""
    for problem, _ in results:
        if problem is not None:
            return problem
    for rank, (_, sha256) in enumerate(results):
        if sha256 != results[0][1]:
            return f"{folder / checkpoint_files.MANIFEST}: rank {rank} reads another content than rank 0"
    return None


def _check_file(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        fingerprint = checkpoint_files.fingerprint(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if fingerprint != manifest["files"][path.name]:
        raise CheckpointError(f"{path} is damaged: its size or checksum differs from the manifest")
    shard_files.check_file(path, manifest["parameters"])


def restore(checkpoint: Checkpoint, shards: Sequence[ParamShard], shapes: Mapping[str, Sequence[int]]) -> None:
    """Load a checkpoint's parameters, and optimizer states if the shards have them, into shards.

    Args:
        checkpoint: verified.
        shards: this rank's shards.
        shapes: name -> full shape of the model's trainable parameters.

    Raises:
        CheckpointError: the model's trainable parameters differ from the saved ones.
    """
    table = checkpoint.manifest["parameters"]
    shard_files.check_parameters(checkpoint.folder, table, shapes)
    shard_files.read(checkpoint.folder, table, shards)


def restore_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load a checkpoint's parameters into an unsharded model.

    Raises:
        CheckpointError: the model's trainable parameters differ from the saved ones.
    """
    restore(checkpoint, full_param_shards(model), trainable_shapes(model))


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return name -> full shape of a model's trainable parameters."""
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_rng(checkpoint: Checkpoint, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the random state of a rank; None if the checkpoint was written by fewer ranks.

    Raises:
        CheckpointError: its file cannot be read any more.
    """
    name = checkpoint_files.rng_file(rank)
    return checkpoint_files.read_tensors(checkpoint.folder / name) if name in checkpoint.manifest["files"] else None
