"""Prefetched batches that are not trained on yet, as a file of a checkpoint.

A resumed run trains on the same responses. The file has no prompts: they are drawn from the data again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.values import Completions, PromptBatch

_TENSORS = ("prompt_index", "tokens", "offsets", "logprobs", "finished", "versions", "floors")
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
        values_json = {"asked": _prompt_key(batch.prompts), "metrics": dict(batch.metrics)}
        tensors |= pack(f"{i}.", batch.completions, values_json)
    return {_file(rank): tensors} if tensors else {}


def pack(prefix: str, completions: Completions, values_json: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return completions and further JSON values as tensors, their names with a prefix; `unpack` reads them."""
    values_json = {
        **values_json,
        "texts": completions.texts,
        "weight_version": completions.weight_version,
        "late": completions.late,
        "dropped": [*completions.dropped.items()],
    }
    values = {name: getattr(completions, name) for name in _TENSORS}
    values[_JSON] = torch.tensor(list(json.dumps(values_json).encode()), dtype=torch.uint8)
    return {prefix + name: value for name, value in values.items() if value is not None}


def unpack(prefix: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Completions, dict[str, Any]] | None:
    """Return what `pack` packed, with all JSON values; None if there is nothing under this prefix."""
    if prefix + _JSON not in tensors:
        return None
    values_json = json.loads(bytes(tensors[prefix + _JSON].tolist()))
    values: dict[str, Any] = {name: tensors.get(prefix + name) for name in _TENSORS}
    values |= {"texts": tuple(values_json["texts"]), "weight_version": values_json["weight_version"]}
    late, dropped = values_json.get("late"), dict(values_json.get("dropped", ()))  # absent in older checkpoints
    return Completions(**values, late=late, dropped=dropped), values_json


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
    for completions, values_json in _read(checkpoint.folder / name):
        age = step + len(prefetched) - completions.weight_version
        before = source.state()
        prompts = source.next()
        reason = None
        if age > max_staleness:
            reason = f"rollout.max_staleness={max_staleness}"
        elif _prompt_key(prompts) != values_json["asked"]:
            reason = "the prompts have changed"
        elif full_vocabulary and completions.floors is not None:
            reason = "algorithm.kl.estimator=exact needs responses that were sampled from the full vocabulary"
        if reason is not None:
            source.restore(before)
            return prefetched, [
                f"prefetched responses are sampled again from step {step + len(prefetched) + 1} on: {reason}"
            ]
        prefetched.append(PrefetchedBatch(Batch(prompts, completions, values_json["metrics"]), source.state()))
    return prefetched, []


def _file(rank: int) -> str:
    return f"ahead-rank{rank}.safetensors"


def _prompt_key(batch: PromptBatch) -> list[list[Any]]:
    """Return the uid and tokens of each prompt of a batch, for comparison."""
    return [[prompt.uid, list(prompt.token_ids)] for prompt in batch.prompts]


def _read(path: Path) -> Iterator[tuple[Completions, dict[str, Any]]]:
    tensors = checkpoint_files.read_tensors(path)
    i = 0
    while (batch := unpack(f"{i}.", tensors)) is not None:
        yield batch
        i += 1
