"""A captured step: a run writes it (`trainer.capture_steps`), `hwgrpo replay` reads it; files: captured_files.py."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hwgrpo.support.file_systems import sync_folder
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.support.run_files import write_whole
from hwgrpo.training.captured_files import FACTS, SUMS, TENSORS
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards, TrainBatch

ENTRIES = 64
"""Entries of a weight and of its gradient that are kept, of every parameter."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
VALUES = {"completions.": Completions, "rewards.": Rewards, "batch.": TrainBatch}
"""Prefix of a value's tensors -> its class."""


def entry_places(count: int) -> torch.Tensor:
    """Return [E] int64, ascending: the entries that are kept of a tensor of `count` elements, spread evenly over it.

    Multiples of the golden ratio are in different columns of a matrix, which entries at equal distances need not be.
    """
    if count <= ENTRIES:
        return torch.arange(count)
    if count < 4 * ENTRIES:  # multiples would meet
        return torch.arange(ENTRIES) * count // ENTRIES
    shares = (torch.arange(ENTRIES, dtype=torch.float64) * GOLDEN_RATIO) % 1
    return (shares * count).long().sort().values


def entries_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the kept entries [E] fp32 of a tensor, on the host."""
    places = entry_places(tensor.numel()).to(tensor.device)
    return tensor.detach().reshape(-1)[places].float().cpu()


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a captured step in the folder of a run's captures."""
    return root / f"step_{step:05d}"


class StepWriter:
    """Writes the files of one step into a temporary folder, which gets its name when they are complete.

    Args:
        root: folder of the run's captures; made if its parent exists.
        step: the step; an earlier capture of it is replaced.

    Raises:
        OSError: the folder cannot be made; also raised by each method.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.folder = folder_of(root, step)
        self._partial = root / f".{self.folder.name}.partial"
        self._sums: dict[str, str] = {}
        self.bytes = 0
        """Size of the files written so far."""
        root.mkdir(exist_ok=True)  # without parents: a run's folder that was moved is not recreated
        checkpoint_files.discard(self._partial)
        self._partial.mkdir()

    def add_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file."""
        self._add(name, checkpoint_files.write_tensors(self._partial / name, tensors))

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write step.json and the checksums, and rename the folder."""
        write_whole(self._partial / FACTS, json.dumps(jsonable(facts), indent=1))
        self._add(FACTS, checkpoint_files.fingerprint(self._partial / FACTS))
        write_whole(self._partial / SUMS, "".join(f"{each}  {name}\n" for name, each in self._sums.items()))
        sync_folder(self._partial)
        checkpoint_files.discard(self.folder)
        os.replace(self._partial, self.folder)
        sync_folder(self.folder.parent)

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _add(self, name: str, fingerprint: Mapping[str, Any]) -> None:
        self._sums[name] = fingerprint["sha256"]
        self.bytes += fingerprint["bytes"]


@dataclass(frozen=True)
class Parameter:
    """What a captured step knows of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of it."""
    trained: bool
    before: torch.Tensor
    """[E] fp32: entries before the update."""
    gradient: torch.Tensor | None
    """[E] fp32: entries of the first update's gradient, before it is clipped; None: frozen."""
    norm: float
    """Norm of that gradient; NaN: frozen."""
    after: torch.Tensor | None
    """[E] fp32: entries after the first update; None: frozen."""


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, verified."""

    folder: Path
    facts: Mapping[str, Any]
    """Content of step.json."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def step(self) -> int:
        """The step's number, from 1."""
        return self.facts["step"]

    def value(self, prefix: str) -> Any:
        """Return the value of one of `VALUES`."""
        return VALUES[prefix].from_tensors(prefix, self.tensors, self.facts["values"][prefix])

    @cached_property
    def prompts(self) -> PromptBatch:
        """The step's prompts."""
        return PromptBatch(
            tuple(
                Prompt(
                    **{
                        **each,
                        "token_ids": tuple(each["token_ids"]),
                        "messages": None if each["messages"] is None else tuple(each["messages"]),
                    }
                )
                for each in self.facts["prompts"]
            )
        )

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The model's parameters, in its order."""
        table = self.facts["parameters"]
        counts = [len(entry_places(math.prod(each["shape"]))) for each in table]
        trained = [count for count, each in zip(counts, table, strict=True) if each["trained"]]
        before = self.tensors["weights.before"].split(counts)
        results = [
            iter(self.tensors[name].split(sizes))
            for name, sizes in (
                ("gradients", trained),
                ("gradient_norms", [1] * len(trained)),
                ("weights.after", trained),
            )
        ]
        found = []
        for each, entries in zip(table, before, strict=True):
            gradient, norm, after = (next(result) for result in results) if each["trained"] else (None, None, None)
            found.append(
                Parameter(
                    each["name"],
                    tuple(each["shape"]),
                    each["dtype"],
                    each["trained"],
                    entries,
                    gradient,
                    math.nan if norm is None else float(norm),
                    after,
                )
            )
        return tuple(found)


def read_step(folder: Path, facts: Mapping[str, Any]) -> CapturedStep:
    """Return a captured step whose files `read_facts` has verified.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    return CapturedStep(folder, facts, checkpoint_files.read_tensors(folder / TENSORS))
