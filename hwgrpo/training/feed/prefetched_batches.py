"""Prefetched batches that are not trained on yet, as a file of a checkpoint.

A resumed run trains on the same responses. The file has no prompts: they are drawn from the data again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hwgrpo.ragged import Ragged
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.values import Completions, PromptBatch

_JSON = "words"
"""Suffix of a batch's JSON values, as bytes."""


def files_of(batches: Sequence[Batch], rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's file name -> tensors of its batches; empty if there are none.

    Args:
        batches: prefetched batches, the next first.
        rank: rank of this process.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(batches):
        further = {"asked": _prompt_key(batch.prompts), "metrics": dict(batch.metrics)}
        tensors |= pack(f"{i}.", [batch.completions], further)
    return {_file(rank): tensors} if tensors else {}


def pack(prefix: str, values: Sequence[Ragged], further: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ragged values and further JSON values as tensors, their names with a prefix; `values_json` reads these."""
    tensors: dict[str, torch.Tensor] = {}
    values_json = {**further}
    for value in values:
        of_value, json_of_value = value.to_tensors(prefix)
        tensors |= of_value
        values_json |= json_of_value
    tensors[prefix + _JSON] = torch.tensor(list(json.dumps(values_json).encode()), dtype=torch.uint8)
    return tensors


def values_json(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return all JSON values that `pack` packed; None if there is nothing under this prefix."""
    packed = tensors.get(prefix + _JSON)
    return None if packed is None else json.loads(bytes(packed.tolist()))


def load(
    checkpoint: Checkpoint, source: PromptSource, max_staleness: int, *, full_vocabulary: bool = False
) -> tuple[list[PrefetchedBatch], list[str]]:
    """Return a checkpoint's batches that this rank can use, and a note on the others, which are sampled again.

    Args:
        checkpoint: verified.
        source: this rank's prompts, positioned after the checkpoint's step; on return, after the last batch.
        max_staleness: the run's current bound, in weight versions.
        full_vocabulary: use only responses that were sampled from the full vocabulary.
    """
    name = _file(source.rank)
    if name not in checkpoint.manifest["files"]:
        return [], []
    step, ranks = checkpoint.step, checkpoint.manifest["world_size"]
    if ranks != source.world_size:
        return [], [f"responses prefetched by {ranks} ranks are sampled again: now there are {source.world_size}"]
    prefetched: list[PrefetchedBatch] = []
    for completions, packed in _read(checkpoint.folder / name):
        age = step + len(prefetched) - completions.weight_version
        before = source.state()
        prompts = source.next()
        reason = None
        if age > max_staleness:
            reason = f"rollout.max_staleness={max_staleness}"
        elif _prompt_key(prompts) != packed["asked"]:
            reason = "the prompts have changed"
        elif full_vocabulary and completions.floors is not None:
            reason = "algorithm.kl.estimator=exact needs responses that were sampled from the full vocabulary"
        if reason is not None:
            source.restore(before)
            return prefetched, [
                f"prefetched responses are sampled again from step {step + len(prefetched) + 1} on: {reason}"
            ]
        prefetched.append(PrefetchedBatch(Batch(prompts, completions, packed["metrics"]), source.state()))
    return prefetched, []


def _file(rank: int) -> str:
    return f"ahead-rank{rank}.safetensors"


def _prompt_key(batch: PromptBatch) -> list[list[Any]]:
    """Return the uid and tokens of each prompt of a batch, for comparison."""
    return [[prompt.uid, list(prompt.token_ids)] for prompt in batch.prompts]


def _read(path: Path) -> Iterator[tuple[Completions, dict[str, Any]]]:
    tensors = checkpoint_files.read_tensors(path)
    i = 0
    while (packed := values_json(f"{i}.", tensors)) is not None:
        yield Completions.from_tensors(f"{i}.", tensors, packed), packed
        i += 1
