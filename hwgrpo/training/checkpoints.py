"""Checkpoints: safetensors and a JSON manifest with checksums, written atomically, verified before use.

A checkpoint folder `step-00000012` holds the trainable parameters, AdamW's moments by parameter name, the random state
of each rank, and `manifest.json`. It appears by one rename after everything in it has reached the disk, so a kill at
any instruction leaves either the whole of it or none. No pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hwgrpo.errors import CheckpointError
from hwgrpo.training.strategies.strategy import Strategy

SCHEMA = "hwgrpo.checkpoint/1"
_NAME = re.compile(r"step-(\d{8})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


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
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    strategy: Strategy,
    keep: int,
) -> Path:
    """Write a checkpoint and drop all but the newest `keep`.

    Args:
        root: folder of the run's checkpoints.
        step: the last finished step.
        module: the policy, unwrapped; its trainable parameters are saved.
        optimizer: AdamW over those parameters.
        rng: this rank's random state, name -> uint8 tensor.
        state: JSON-able rest (sampler position, updates done, ...), equal on all ranks.
        strategy: ranks write together, into one folder that all of them see; rank 0 writes what they share.
        keep: how many checkpoints stay.

    Returns:
        The checkpoint's folder.
    """
    final = root / f"step-{step:08d}"
    partial = root / f".step-{step:08d}.partial"
    if strategy.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    strategy.barrier()
    _write(partial / f"rng-rank{strategy.rank}.safetensors", dict(rng))
    if strategy.rank == 0:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _write(partial / "model.safetensors", {name: p.detach() for name, p in named.items()})
        _write(partial / "optimizer.safetensors", dict(_moments(named, optimizer)))
    strategy.barrier()
    if strategy.rank == 0:
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "world_size": strategy.world_size,
            "torch": torch.__version__,
            "state": dict(state),
            "files": {path.name: _fingerprint(path) for path in sorted(partial.iterdir())},
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


def restore_weights(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Put a checkpoint's parameters in place, on the devices they belong to.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    saved = load_file(checkpoint.folder / "model.safetensors")
    if saved.keys() != named.keys():
        odd = sorted(saved.keys() ^ named.keys())
        raise CheckpointError(
            f"{checkpoint.folder} was saved by another model or LoRA setting: {len(odd)} parameters are in one and not "
            f"in the other, e.g. {odd[0]}"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            if saved[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{checkpoint.folder}: {name} has shape {tuple(saved[name].shape)}, the model's is "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(saved[name])


def restore(checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's parameters and AdamW moments in place, on the devices they belong to.

    Raises:
        CheckpointError: the model has other trainable parameters than the one that was saved.
    """
    restore_weights(checkpoint, module)
    moments = load_file(checkpoint.folder / "optimizer.safetensors")
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        state = {key: moments[f"{name}.{key}"] for key in _MOMENTS if f"{name}.{key}" in moments}
        optimizer.state[parameter] = {
            # AdamW keeps `step` where its implementation wants it: on the device when fused, on the CPU else
            key: value.clone() if key == "step" and not _fused(optimizer) else value.to(parameter.device)
            for key, value in state.items()
        }


def load_rng(checkpoint: Checkpoint, rank: int) -> dict[str, torch.Tensor] | None:
    """Return the random state of a rank, or None when the checkpoint was written by fewer ranks."""
    path = checkpoint.folder / f"rng-rank{rank}.safetensors"
    return load_file(path) if path.is_file() else None


def _moments(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert key in _MOMENTS, f"unexpected optimizer state {key}"
            yield f"{name}.{key}", value


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))


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
