"""Groups that a later step may train on, surplus and replayed ones, as files of a checkpoint.

Each rank writes its own; every rank reads all of them, so that a run resumes on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config import Config
from hwgrpo.config.derived import has_exact_kl
from hwgrpo.config.load import to_tree
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.data.difficulty import epoch_and_row
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.prefetched_batches import pack, values_json
from hwgrpo.training.feed.scored_groups import ScoredGroup
from hwgrpo.values import Completions, Prompt, Rewards


@dataclass(frozen=True)
class StoredGroups:
    """The groups of a checkpoint, in order."""

    surplus: list[ScoredGroup]
    replay: list[ScoredGroup]


def files_of(
    surplus: Mapping[int, ScoredGroup], replay: Mapping[int, ScoredGroup], rank: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's file name -> tensors of its groups; empty if there are none.

    Args:
        surplus: index over all ranks -> group of this rank.
        replay: the same for the groups to replay.
        rank: rank of this process.
    """
    tensors: dict[str, torch.Tensor] = {}
    for kind, groups in (("surplus", surplus), ("replay", replay)):
        for i, group in groups.items():
            further = {"uid": group.prompt.uid, "prompt": list(group.prompt.token_ids)}
            tensors |= pack(f"{kind}.{i}.", [group.completions, group.rewards], further)
    return {_file(rank): tensors} if tensors else {}


def left_out(count: int, reason: str) -> list[str]:
    """Return a note that stored groups are not used; none for no groups."""
    return [f"{count} groups kept for later steps are left out: {reason}"] if count else []


def unused_note(checkpoint: Checkpoint, config: Config) -> list[str]:
    """Return a note if a checkpoint has groups, and a run no filter that would use them.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    if config.algorithm.filter_groups.enable:
        return []
    count = 0
    for path in _paths(checkpoint):
        with checkpoint_files.reading(path), safe_open(path, framework="pt") as file:
            count += len({tuple(name.split(".")[:2]) for name in file.keys()})  # noqa: SIM118  (it is no dict)
    return left_out(count, "algorithm.filter_groups.enable=false")


def load(
    checkpoint: Checkpoint, dataset: PromptDataset, functions: Sequence[str], config: Config
) -> tuple[StoredGroups, list[str]]:
    """Return the groups of all ranks of a checkpoint, and a note if the run can no longer train on some.

    Args:
        checkpoint: verified.
        dataset: the training prompts; groups of others are left out.
        functions: names of the reward functions; groups that others have scored are left out.
        config: the run's settings; groups that were scored by others, or without the rewards of steps that the
            estimator reads, are left out, and with a KL over the full vocabulary those sampled from a truncated one.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _paths(checkpoint):
        tensors |= checkpoint_files.read_tensors(path)
    lost = truncated = 0
    reads_steps = takes(config.algorithm.advantage, "steps")
    same_scores = _scoring(stored_tree(checkpoint.manifest["state"]["config"])) == _scoring(to_tree(config))
    stored = StoredGroups([], [])
    for kind, groups in (("surplus", stored.surplus), ("replay", stored.replay)):
        indices = sorted({int(name.split(".")[1]) for name in tensors if name.startswith(f"{kind}.")})
        for i in indices:
            group = _group(f"{kind}.{i}.", tensors, dataset, functions) if same_scores else None
            if group is None or (group.rewards.steps is not None) != reads_steps:
                lost += 1
            elif has_exact_kl(config) and group.completions.floors is not None:
                truncated += 1
            else:
                groups.append(group)
    changed = "their prompts, reward functions or those functions' settings have changed"
    exact = "algorithm.kl.estimator=exact needs responses that were sampled from the full vocabulary"
    return stored, left_out(lost, changed) + left_out(truncated, exact)


def _paths(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of all ranks that have groups."""
    names = map(_file, range(checkpoint.manifest["world_size"]))
    return [checkpoint.folder / name for name in names if name in checkpoint.manifest["files"]]


def _file(rank: int) -> str:
    return f"groups-rank{rank}.safetensors"


def _scoring(settings: Mapping[str, Any]) -> list[Any]:
    """Return the settings that decide rewards, beside the functions; those newer than a checkpoint by default."""
    reward, process = settings["reward"], settings["algorithm"].get("process", {})
    functions = [(each.get("weight", 1.0), each.get("kwargs", {})) for each in reward["functions"]]
    return [reward.get("shuffle", False), process.get("delimiter", "\n"), process.get("pattern"), *functions]


def _group(
    prefix: str, tensors: Mapping[str, torch.Tensor], dataset: PromptDataset, functions: Sequence[str]
) -> ScoredGroup | None:
    """Return one group; None if its prompt is no longer in the data, or other reward functions have scored it."""
    packed = values_json(prefix, tensors)
    assert packed is not None, prefix
    prompt = _prompt(packed, dataset)
    if prompt is None or packed["functions"] != list(functions):
        return None
    completions = Completions.from_tensors(prefix, tensors, packed)
    return ScoredGroup(prompt, completions, Rewards.from_tensors(prefix, tensors, packed))


def _prompt(packed: Mapping[str, Any], dataset: PromptDataset) -> Prompt | None:
    epoch, row = epoch_and_row(packed["uid"])
    if row >= len(dataset):
        return None
    prompt = dataset.prompt(row, epoch)
    return prompt if list(prompt.token_ids) == packed["prompt"] else None
