"""Prefetched batches that are not trained on yet, as a file of a checkpoint.

A resumed run trains on the same responses. The file has no prompts: they are found in the data again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config import Config
from hwgrpo.config.derived import has_exact_kl
from hwgrpo.config.rollout_rules import scores_ahead
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed import group_files
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.training.feed.scored_groups import KeptGroups, PlacedGroup, ScoredGroup, pack, values_json
from hwgrpo.training.strategies.strategy import Ranks, raise_on_all_ranks
from hwgrpo.values import Completions, PromptBatch, Rewards


def files_of(batches: Sequence[PrefetchedBatch], rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's file name -> tensors of its batches; empty if there are none.

    Args:
        batches: prefetched batches, the next first.
        rank: rank of this process.
    """
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[int, ScoredGroup] = {}  # a group is kept after several batches, and stored once
    for i, each in enumerate(batches):
        batch, rewards = each.batch, each.batch.rewards
        further = {
            "asked": _prompt_key(batch.prompts),
            "metrics": dict(batch.metrics),
            "state": each.state,
            "sampled_with": batch.sampled_with,
            "notes": batch.notes,
            "dropped_records": [dict(record) for record in batch.dropped],
            "scored": rewards is not None,
            "reads_environments": rewards is None and _has_environments(batch),
            "kept": [_placement(each.kept.surplus, groups), _placement(each.kept.replay, groups)],
        }
        tensors |= pack(f"{i}.", [batch.completions, *([] if rewards is None else [rewards])], further)
        if batch.greedy is not None:
            tensors |= pack(f"{i}.greedy.", [batch.greedy], {})
    tensors |= group_files.tensors_of({f"group.{i}.": group for i, group in enumerate(groups.values())})
    return {_file(rank): tensors} if tensors else {}


def load(
    checkpoint: Checkpoint, source: PromptSource, config: Config, functions: Sequence[str], ranks: Ranks
) -> tuple[list[PrefetchedBatch], list[str]]:
    """Return a checkpoint's batches that all ranks can use, and a note on the others, which are sampled again.

    Args:
        checkpoint: verified.
        source: this rank's prompts, positioned after the checkpoint's step; on return, after the last batch.
        config: the run's settings.
        functions: names of the reward functions.
        ranks: the ranks of this run.
    """
    start = source.state()
    prefetched, reason = raise_on_all_ranks(ranks, lambda: _usable(checkpoint, source, config, functions))
    counts, reasons = zip(*ranks.gather_objects((len(prefetched), reason)), strict=True)
    prefetched = prefetched[: min(counts)]
    source.restore(prefetched[-1].state if prefetched else start)
    reason = reasons[counts.index(min(counts))]
    first = checkpoint.step + len(prefetched) + 1
    return prefetched, [f"prefetched responses are sampled again from step {first} on: {reason}"] if reason else []


def _usable(
    checkpoint: Checkpoint, source: PromptSource, config: Config, functions: Sequence[str]
) -> tuple[list[PrefetchedBatch], str | None]:
    """Return a checkpoint's batches that this rank can use, and why it cannot use the next, if there is one."""
    saved_by = checkpoint.manifest["world_size"]
    if _file(0) in checkpoint.manifest["files"] and saved_by != source.world_size:
        return [], f"{saved_by} ranks sampled them, and now there are {source.world_size}"
    prefetched: list[PrefetchedBatch] = []
    if _file(source.rank) not in checkpoint.manifest["files"]:
        return prefetched, None
    alike = group_files.same_scores(checkpoint, config)
    for each, packed in _read(checkpoint, source):
        prompts = _prompts(packed, source)
        age = checkpoint.step + len(prefetched) - each.batch.versions[0]
        reason = None
        if age > config.rollout.max_staleness:
            reason = f"rollout.max_staleness={config.rollout.max_staleness}"
        elif prompts is None or _prompt_key(prompts) != packed["asked"]:
            reason = "the prompts have changed"
        elif packed.get("reads_environments"):
            reason = "their environments, which reward functions may read, cannot be saved"
        elif has_exact_kl(config) and each.batch.completions.floors is not None:
            reason = "algorithm.kl.estimator=exact needs responses that were sampled from the full vocabulary"
        else:
            reason = _changed(each, config, functions, alike, source.rank)
        if reason is not None or prompts is None:
            return prefetched, reason
        if "state" in packed:
            source.restore(packed["state"])
        prefetched.append(replace(each, batch=replace(each.batch, prompts=prompts), state=source.state()))
    return prefetched, None


def _changed(
    prefetched: PrefetchedBatch, config: Config, functions: Sequence[str], same_scores: bool, rank: int
) -> str | None:
    """Return why a run of these settings collects other batches; None if it collects such ones."""
    batch = prefetched.batch
    a, rewards = config.algorithm, batch.rewards
    if (batch.greedy is not None) != takes(a.advantage, "greedy_S"):
        return f"algorithm.advantage.name={a.advantage.name}"
    if (batch.sampled_with is not None) != a.filter_groups.enable:
        return f"algorithm.filter_groups.enable={str(a.filter_groups.enable).lower()}"
    if (rewards is None) != (scores_ahead(config) is None):
        return "it is scored with its step now" if rewards is not None else f"{scores_ahead(config)}"
    if rewards is None:
        return None
    if not same_scores or [*rewards.per_function] != [*functions]:
        return "the reward functions or their settings have changed"
    if any(each.home == rank and each.group is None for each in (*prefetched.kept.surplus, *prefetched.kept.replay)):
        return "the prompts have changed"
    return None if (rewards.steps is not None) == takes(a.advantage, "steps") else "the estimator reads other rewards"


def _has_environments(batch: Batch) -> bool:
    """Return whether there are environments that reward functions may read (`for_rewards`)."""
    outcomes = [*batch.completions.outcomes, *(() if batch.greedy is None else batch.greedy.outcomes)]
    return any(getattr(outcome, "environment", None) is not None for outcome in outcomes)


def _placement(kept: Sequence[PlacedGroup], groups: dict[int, ScoredGroup]) -> list[list[Any]]:
    """Return what all ranks know of groups, and the number of this rank's in its file; they are added to `groups`."""
    for each in kept:
        if each.group is not None:
            groups.setdefault(id(each.group), each.group)
    numbers = {key: i for i, key in enumerate(groups)}
    return [[each.home, each.std, each.version, numbers.get(id(each.group))] for each in kept]


def _placed(placement: Sequence[Sequence[Any]], groups: Sequence[ScoredGroup | None]) -> tuple[PlacedGroup, ...]:
    """Return the groups of which `_placement` returned this."""
    return tuple(
        PlacedGroup(home, std, version, None if number is None else groups[number])
        for home, std, version, number in placement
    )


def _file(rank: int) -> str:
    return f"ahead-rank{rank}.safetensors"


def _prompt_key(batch: PromptBatch) -> list[list[Any]]:
    """Return the uid, tokens and, where it has some, hashes of images of each prompt of a batch, for comparison."""
    return [
        [prompt.uid, list(prompt.token_ids), *([images] if (images := group_files.images_of(prompt)) else [])]
        for prompt in batch.prompts
    ]


def _prompts(packed: Mapping[str, Any], source: PromptSource) -> PromptBatch | None:
    """Return the prompts of a batch; None if the data has them no more, or a step has another number of prompts."""
    if "state" not in packed:  # of version 0.1: the next prompts in the data
        return source.next()
    if len(packed["asked"]) != source.prompts_per_step // source.world_size:
        return None
    found = [
        group_files.prompt_of(uid, token_ids, source.dataset, *images) for uid, token_ids, *images in packed["asked"]
    ]
    prompts = tuple(prompt for prompt in found if prompt is not None)
    return PromptBatch(prompts) if len(prompts) == len(found) else None


def _read(checkpoint: Checkpoint, source: PromptSource) -> Iterator[tuple[PrefetchedBatch, dict[str, Any]]]:
    """Yield this rank's batches, without their prompts, and their JSON values."""
    tensors = checkpoint_files.read_tensors(checkpoint.folder / _file(source.rank))
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("group.")}
    groups = [group_files.read(f"group.{i}.", tensors, source.dataset) for i in range(len(numbers))]
    i = 0
    while (packed := values_json(f"{i}.", tensors)) is not None:
        completions, rewards, greedy = Completions.from_tensors(f"{i}.", tensors, packed), None, None
        if packed.get("scored"):
            rewards = Rewards.from_tensors(f"{i}.", tensors, packed)
        of_greedy = values_json(f"{i}.greedy.", tensors)
        if of_greedy is not None:
            greedy = Completions.from_tensors(f"{i}.greedy.", tensors, of_greedy)
        versions = packed.get("sampled_with")
        batch = Batch(
            PromptBatch(()),
            completions,
            packed["metrics"],
            rewards=rewards,
            greedy=greedy,
            sampled_with=None if versions is None else (versions[0], versions[1]),
            notes=tuple(packed.get("notes", ())),
            dropped=packed.get("dropped_records", ()),
        )
        surplus, replay = (_placed(kept, groups) for kept in packed.get("kept", ([], [])))
        yield PrefetchedBatch(batch, {}, KeptGroups(surplus, replay)), packed
        i += 1
