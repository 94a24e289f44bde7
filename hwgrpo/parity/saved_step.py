"""What a machine computed in the step, in a file: two machines are compared with each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import hwgrpo
from hwgrpo.errors import ConfigError
from hwgrpo.parity.fixed_step import FixedStep
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.stage_differences import Stage, compare_tensor, worst_of

SCHEMA = "hwgrpo.parity_step/1"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a machine computed."""

    stage: str
    values: torch.Tensor
    """fp32, on the host."""
    tolerance: float
    """Of its difference from fp64."""


@dataclass(frozen=True)
class SavedStep:
    """A machine's tensors."""

    tensors: Mapping[str, SavedTensor]
    """In the order in which a step computes them."""
    model: str
    """Checksum of the model's weights and of the step."""
    machine: str
    """The device, its backend, dtype and torch, for people."""


def checksum_of(model: Any, step: FixedStep, settings: Sequence[str]) -> str:
    """Return a checksum of all that determines the result: version, settings, model, step."""
    images = [each and each.digest for each in step.images]
    digest = hashlib.sha256(repr((hwgrpo.__version__, settings, step.prompts, images)).encode())
    digest.update(model.config.to_json_string().encode())
    of_step = (step.tokens, step.offsets, step.rewards, step.old_gaps, step.ref_gaps)
    for name, tensor in (*model.named_parameters(), *enumerate(of_step)):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def write(path: Path, step: SavedStep) -> None:
    """Write a machine's tensors as safetensors, with a checksum.

    Raises:
        ConfigError: the file cannot be written.
    """
    values = {name: tensor.values.contiguous() for name, tensor in step.tensors.items()}
    order = [[name, tensor.stage, tensor.tolerance] for name, tensor in step.tensors.items()]
    header = {"schema": SCHEMA, "model": step.model, "machine": step.machine, "tensors": json.dumps(order)}
    try:
        save_file(values, path, header | {"sha256": _checksum(values, header)})
        follow_umask(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--save {path} cannot be written: {error}; choose another place") from error


def read(path: Path) -> SavedStep:
    """Read what `write` wrote.

    Raises:
        ConfigError: the file is missing, cut, changed, or of another version.
    """
    again = "write it again there with `hwgrpo parity --save`"
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--against {path} cannot be read: {error}; {again}") from error
    if header.get("schema") != SCHEMA:
        raise ConfigError(
            f"--against {path} has the schema {header.get('schema')!r}, and this version of hwgrpo reads {SCHEMA!r}; "
            f"{again}, with the same version"
        )
    if header.pop("sha256", None) != _checksum(values, header):
        raise ConfigError(f"--against {path}: its checksum is not that of its tensors, so it was changed; {again}")
    order = json.loads(header["tensors"])
    tensors = {name: SavedTensor(stage, values[name], tolerance) for name, stage, tolerance in order}
    return SavedStep(tensors, header["model"], header["machine"])


def compare_steps(mine: SavedStep, theirs: SavedStep, path: Path) -> Iterator[Stage]:
    """Yield the stages of two machines: differences of their tensors, by the larger of their tolerances.

    Args:
        mine: this machine's.
        theirs: the other's.
        path: its file, for the message.

    Raises:
        ConfigError: they are of other models or steps.
    """
    if mine.model != theirs.model:
        raise ConfigError(
            f"--against {path} is of another model, seed or step; run both with the same model.path, trainer.seed and "
            "version of hwgrpo"
        )
    if several := sorted(mine.tensors.keys() ^ theirs.tensors.keys()):
        raise ConfigError(
            f"--against {path}: only one of the two machines computed {', '.join(several[:3])}, ...; run both with the "
            "same trainer.strategy and model.layout"
        )
    for stage, names in groupby(mine.tensors, lambda name: mine.tensors[name].stage):
        pairs = [(name, mine.tensors[name], theirs.tensors[name]) for name in names]
        yield worst_of(
            compare_tensor(stage, name, a.values, b.values, max(a.tolerance, b.tolerance)) for name, a, b in pairs
        )


def _checksum(values: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(values):
        digest.update(f"{name} {tuple(values[name].shape)}".encode())
        digest.update(values[name].view(-1).numpy().tobytes())
    return digest.hexdigest()
