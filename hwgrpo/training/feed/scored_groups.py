"""Groups of scored responses as single values, which a step can select, exchange between ranks, and store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo.config.schema import FilterGroupsConfig
from hwgrpo.errors import ConfigError, nearest
from hwgrpo.ragged import Ragged
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt, its n responses and their rewards; no responses if the engine dropped the group for being late."""

    prompt: Prompt
    completions: Completions
    """With `prompt_index` 0."""
    rewards: Rewards


@dataclass(frozen=True)
class PlacedGroup:
    """A group on one of the ranks, as all of them know it."""

    home: int
    """Rank that has the group."""
    std: float
    """Standard deviation of the metric in the group."""
    version: int
    """Version of the weights that sampled it."""
    group: ScoredGroup | None
    """The group; None on the other ranks."""


@dataclass(frozen=True)
class KeptGroups:
    """Groups that a later step may train on, in their order over all ranks."""

    surplus: tuple[PlacedGroup, ...] = ()
    replay: tuple[PlacedGroup, ...] = ()


NO_GROUPS = KeptGroups()


def split(prompts: PromptBatch, completions: Completions, rewards: Rewards) -> list[ScoredGroup]:
    """Return the groups of a batch, in the order of its prompts. Counts of failures stay behind."""
    parts = completions.by_prompt(len(prompts))
    scored = rewards.split(map(len, parts))
    return [ScoredGroup(*group) for group in zip(prompts.prompts, parts, scored, strict=True)]


def join(groups: Sequence[ScoredGroup]) -> tuple[PromptBatch, Completions, Rewards]:
    """Return the batch of these groups, in their order. They may have different weight versions."""
    prompts = PromptBatch(tuple(group.prompt for group in groups))
    completions = Completions.concat([group.completions for group in groups], prompts=[1] * len(groups))
    return prompts, completions, Rewards.concat([group.rewards for group in groups])


def metric_values(group: ScoredGroup, metric: str, *, may_lack: bool = False) -> torch.Tensor:
    """Return [n] fp64: the values of a metric for a group's valid responses, without NaN.

    Args:
        group: the group.
        metric: `reward`, the name of a reward function, or a field that one returned beside its score.
        may_lack: valid responses may lack the field, as where a function failed under the policy `value`.

    Raises:
        ConfigError: a valid response has no such value.
    """
    rewards = group.rewards
    if metric == "reward":
        values = rewards.total
    elif metric in rewards.per_function:
        values = rewards.per_function[metric]
    else:
        extras = rewards.extras or ({},) * len(rewards.total)
        numbers = [
            _extra(extra, metric, rewards, may_lack) if valid else math.nan
            for extra, valid in zip(extras, rewards.valid.tolist(), strict=True)
        ]
        values = torch.tensor(numbers, dtype=torch.float64)
    return values[rewards.valid & ~values.isnan()]


def passes(values: torch.Tensor, config: FilterGroupsConfig) -> bool:
    """Return whether a group's values [n] differ as `algorithm.filter_groups` demands; fewer than two never do."""
    if values.numel() < 2 or not values.max() > values.min():
        return False
    above = config.mean_above is None or float(values.mean()) > config.mean_above
    below = config.mean_below is None or float(values.mean()) < config.mean_below
    return above and below and (config.min_std == 0 or spread(values) > config.min_std)


def spread(values: torch.Tensor) -> float:
    """Return the biased standard deviation of a group's values [n]."""
    return float(values.std(correction=0)) if values.numel() else 0.0


def _extra(fields: Mapping[str, Any], metric: str, rewards: Rewards, may_lack: bool) -> float:
    number = number_of(fields[metric]) if metric in fields else None
    if number is None and may_lack:
        return math.nan
    if number is None:
        known = ["reward", *rewards.per_function, *fields]
        near = nearest(metric, known)
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric!r} is no number of this response; there are: {', '.join(known)}."
            f"{f' Did you mean {near!r}?' if near else ''}"
        )
    return number


_JSON = "words"
"""Suffix of the JSON values, as bytes."""


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
