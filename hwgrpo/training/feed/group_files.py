"""Groups that a later step may train on, surplus and replayed ones, as files of a checkpoint.

Each rank writes its own; every rank reads all of them, so that a run resumes on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.catalog import ESTIMATORS
from hwgrpo.config import Config
from hwgrpo.config.derived import has_exact_kl
from hwgrpo.config.load import to_tree
from hwgrpo.config.schema import FilterGroupsConfig
from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.data.difficulty import epoch_and_row
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.scored_groups import (
    KeptGroups,
    PlacedGroup,
    ScoredGroup,
    metric_values,
    pack,
    spread,
    values_json,
)
from hwgrpo.training.strategies.strategy import Ranks, raise_on_all_ranks
from hwgrpo.values import Completions, Prompt, Rewards

T = TypeVar("T")

KINDS = ("surplus", "replay")


def files_of(kept: KeptGroups, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's file name -> tensors of its groups, numbered over all ranks; empty if there are none."""
    own = {
        f"{kind}.{i}.": each.group
        for kind in KINDS
        for i, each in enumerate(getattr(kept, kind))
        if each.group is not None
    }
    return {_file(rank): tensors_of(own)} if own else {}


def tensors_of(groups: Mapping[str, ScoredGroup]) -> dict[str, torch.Tensor]:
    """Return groups as tensors, whose names begin with the group's key."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, group in groups.items():
        further = {"uid": group.prompt.uid, "prompt": list(group.prompt.token_ids), "images": images_of(group.prompt)}
        tensors |= pack(prefix, [group.completions, group.rewards], further)
    return tensors


def read(prefix: str, tensors: Mapping[str, torch.Tensor], dataset: PromptDataset) -> ScoredGroup | None:
    """Return one group; None if its prompt is no longer in the data."""
    packed = values_json(prefix, tensors)
    assert packed is not None, prefix
    prompt = prompt_of(packed["uid"], packed["prompt"], dataset, packed.get("images", ()))
    if prompt is None:
        return None
    completions = Completions.from_tensors(prefix, tensors, packed)
    return ScoredGroup(prompt, completions, Rewards.from_tensors(prefix, tensors, packed))


def left_out(count: int, reason: str) -> list[str]:
    """Return a note that stored groups are not used; none for no groups."""
    return [f"{count} groups kept for later steps are left out: {reason}"] if count else []


def unused_note(checkpoint: Checkpoint, settings: FilterGroupsConfig) -> list[str]:
    """Return a note if a checkpoint has groups, and a run no filter that would use them.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    if settings.enable:
        return []
    count = 0
    for path in _paths(checkpoint):
        with checkpoint_files.reading(path), safe_open(path, framework="pt") as file:
            count += len({tuple(name.split(".")[:2]) for name in file.keys()})  # noqa: SIM118  (it is no dict)
    return left_out(count, "algorithm.filter_groups.enable=false")


def load(
    checkpoint: Checkpoint, dataset: PromptDataset, functions: Sequence[str], config: Config, ranks: Ranks
) -> tuple[KeptGroups, list[str]]:
    """Return the groups of all ranks of a checkpoint, distributed over the ranks, and notes on those left out.

    Args:
        checkpoint: verified.
        dataset: the training prompts; groups of others are left out.
        functions: names of the reward functions; groups that others have scored are left out.
        config: the run's settings; groups that were scored by others, or without the rewards of steps that the
            estimator reads, are left out, and with a KL over the full vocabulary those sampled from a truncated one.
            So are those that `keep_surplus` and `replay_groups` no longer ask for.
        ranks: the ranks of this run.

    Raises:
        CheckpointError: a file cannot be read any more; on all ranks.
    """
    settings = config.algorithm.filter_groups
    stored, notes = raise_on_all_ranks(ranks, lambda: _stored(checkpoint, dataset, functions, config))
    surplus, replay = (
        stored["surplus"] if settings.keep_surplus else [],
        newest(stored["replay"], settings.replay_groups),
    )
    for kind, used, key in (("surplus", surplus, "keep_surplus"), ("replay", replay, "replay_groups")):
        reason = f"algorithm.filter_groups.{key}={str(getattr(settings, key)).lower()}"
        notes += left_out(len(stored[kind]) - len(used), reason)

    def distributed(groups: list[ScoredGroup]) -> tuple[PlacedGroup, ...]:
        homes = [i * ranks.world_size // len(groups) for i in range(len(groups))]
        return tuple(
            PlacedGroup(
                home,
                spread(metric_values(group, settings.metric, may_lack=True)),
                group.completions.weight_version,
                group if home == ranks.rank else None,
            )
            for home, group in zip(homes, groups, strict=True)
        )

    return KeptGroups(distributed(surplus), distributed(replay)), notes


def newest(groups: Sequence[T], count: int) -> list[T]:
    """Return the last `count` groups."""
    return [*groups[-count:]] if count else []


def same_scores(checkpoint: Checkpoint, config: Config) -> bool:
    """Return whether the settings that decide rewards, beside the functions, are those of the checkpoint."""
    return _scoring(stored_tree(checkpoint.manifest["state"]["config"])) == _scoring(to_tree(config))


def images_of(prompt: Prompt) -> list[str]:
    """Return the hashes of a prompt's images; [] without any."""
    return [] if prompt.images is None else [part.digest for part in prompt.images.parts]


def prompt_of(uid: str, token_ids: Sequence[int], dataset: PromptDataset, images: Sequence[str] = ()) -> Prompt | None:
    """Return the prompt of the data with this uid; None if the data has it no more, or with other tokens or images.

    Args:
        uid: of the prompt.
        token_ids: of the prompt.
        dataset: the data.
        images: from `images_of`.
    """
    epoch, row = epoch_and_row(uid)
    if row >= len(dataset):
        return None
    prompt = dataset.prompt(row, epoch)
    return prompt if list(prompt.token_ids) == [*token_ids] and images_of(prompt) == [*images] else None


def _stored(
    checkpoint: Checkpoint, dataset: PromptDataset, functions: Sequence[str], config: Config
) -> tuple[dict[str, list[ScoredGroup]], list[str]]:
    """Return kind -> the groups that a run of these settings can train on, and notes on the others."""
    tensors: dict[str, torch.Tensor] = {}
    for path in _paths(checkpoint):
        tensors |= checkpoint_files.read_tensors(path)
    lost = truncated = 0
    reads_steps = takes(config.algorithm.advantage, "steps")
    scores_alike = same_scores(checkpoint, config)
    stored: dict[str, list[ScoredGroup]] = {kind: [] for kind in KINDS}
    for kind, groups in stored.items():
        indices = sorted({int(name.split(".")[1]) for name in tensors if name.startswith(f"{kind}.")})
        for i in indices:
            group = read(f"{kind}.{i}.", tensors, dataset) if scores_alike else None
            if (
                group is None
                or [*group.rewards.per_function] != [*functions]
                or (group.rewards.steps is not None) != reads_steps
            ):
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
    name = settings["algorithm"].get("advantage", {}).get("name")
    steps = "turns" if name in ESTIMATORS and ESTIMATORS[name].of_turns else process.get("steps", "text")
    separators = process.get("delimiter", "\n"), process.get("pattern")
    return [reward.get("shuffle", False), steps, *separators, *functions]
