"""The files of a captured step, `hwgrpo.step/1`, and their verification, without torch.

RUN/captures/step_00003/ has
step.json           versions, machine, settings without secrets, prompts, and the table of parameters
step.safetensors    the step's value in columns, random states, and its results
weights-rank0.safetensors, moments-rank0.safetensors
                    with `trainer.capture_weights`: weights and optimizer states before the update, as in a checkpoint
SHA256SUMS          checksums of these files, for `sha256sum --check`
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hwgrpo.errors import CheckpointError

SCHEMA = "hwgrpo.step/1"
FOLDER = "captures"
"""A run's folder with its captured steps."""
FACTS, TENSORS, SUMS = "step.json", "step.safetensors", "SHA256SUMS"


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a captured step's step.json, after its files were checked against their checksums.

    Raises:
        CheckpointError: it is no captured step, one of another schema, or a file is missing, cut or changed; the
            message names the file.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} is no captured step: it has no {SUMS}; name a folder that trainer.capture_steps made, as "
            "RUN/captures/step_00003"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / SUMS} cannot be read: {error}") from error
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (FACTS, TENSORS):
        if name not in sums:
            raise CheckpointError(f"{folder / SUMS} is damaged: it does not list {name}; copy the folder again")
    for name, digest in sums.items():
        if name != Path(name).name:
            raise CheckpointError(f"{folder / SUMS} is damaged: the file {name!r} leaves the folder")
        _check(folder / name, digest)
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{folder / FACTS} is no JSON: {error}; copy the folder again") from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        found = facts.get("schema") if isinstance(facts, dict) else None
        raise CheckpointError(f"{folder / FACTS} has schema {found!r}; this version reads {SCHEMA}")
    return facts


def _check(path: Path, digest: str) -> None:
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy the folder again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != digest:
        raise CheckpointError(f"{path} is damaged: its checksum differs from {SUMS}; copy the folder again")
