"""Batches that were sampled ahead and are not trained on yet, as a file of a checkpoint.

A run that goes on from it learns from the very responses that it would have learned from. The prompts themselves are
not in the file: they are drawn again from the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.values import Completions, PromptBatch

_TENSORS = ("prompt_index", "tokens", "offsets", "logprobs", "finished", "versions")
_WORDS = "words"


def files_of(batches: Sequence[Batch], rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's file with batches, under its name; nothing where there are no batches.

    Args:
        batches: sampled and not handed out, the next first.
        rank: whose they are.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(batches):
        words = {
            "asked": _prompt_key(batch.prompts),
            "texts": batch.completions.texts,
            "weight_version": batch.completions.weight_version,
            "metrics": dict(batch.metrics),
        }
        values = {name: getattr(batch.completions, name) for name in _TENSORS}
        values[_WORDS] = torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)
        tensors |= {f"{i}.{name}": value for name, value in values.items() if value is not None}
    return {_file(rank): tensors} if tensors else {}


def load(checkpoint: Checkpoint, source: PromptSource, max_staleness: int) -> tuple[list[PrefetchedBatch], list[str]]:
    """Return the batches of a checkpoint that this rank can go on with, and what to tell of those that it cannot.

    What cannot be used is sampled again.

    Args:
        checkpoint: verified.
        source: this rank's prompts, where they were after the checkpoint's step; on return, after the last batch's.
        max_staleness: the bound that the run has now, in weight versions.
    """
    name = _file(source.rank)
    if name not in checkpoint.manifest["files"]:
        return [], []
    step, ranks = checkpoint.step, checkpoint.manifest["world_size"]
    if ranks != source.world_size:
        return [], [f"what {ranks} ranks had prefetched is sampled again: now there are {source.world_size}"]
    prefetched: list[PrefetchedBatch] = []
    for completions, words in _read(checkpoint.folder / name):
        age = step + len(prefetched) - completions.weight_version
        before = source.state()
        prompts = source.next()
        if age > max_staleness or _prompt_key(prompts) != words["asked"]:
            source.restore(before)
            why = f"rollout.max_staleness={max_staleness}" if age > max_staleness else "the prompts are others"
            return prefetched, [
                f"prefetched responses are sampled again from step {step + len(prefetched) + 1} on: {why}"
            ]
        prefetched.append(PrefetchedBatch(Batch(prompts, completions, words["metrics"]), source.state()))
    return prefetched, []


def _file(rank: int) -> str:
    return f"ahead-rank{rank}.safetensors"


def _prompt_key(batch: PromptBatch) -> list[list[Any]]:
    """Return what a batch asked, to be compared with another."""
    return [[prompt.uid, list(prompt.token_ids)] for prompt in batch.prompts]


def _read(path: Path) -> Iterator[tuple[Completions, dict[str, Any]]]:
    tensors = checkpoint_files.read_tensors(path)
    i = 0
    while f"{i}.{_WORDS}" in tensors:
        words = json.loads(bytes(tensors[f"{i}.{_WORDS}"].tolist()))
        values: dict[str, Any] = {name: tensors.get(f"{i}.{name}") for name in _TENSORS}
        yield Completions(**values, texts=tuple(words["texts"]), weight_version=words["weight_version"]), words
        i += 1
