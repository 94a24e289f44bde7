"""Groups of scored responses as single values, which a step can select, exchange between ranks, and store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hwgrpo.config.optional_settings import FilterGroupsConfig
from hwgrpo.errors import ConfigError, nearest
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.step_rewards import join_steps
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt, its n responses and their rewards; no responses if the engine dropped the group for being late."""

    prompt: Prompt
    completions: Completions
    """With `prompt_index` 0."""
    rewards: Rewards


def split(prompts: PromptBatch, completions: Completions, rewards: Rewards) -> list[ScoredGroup]:
    """Return the groups of a batch, in the order of its prompts. Counts of failures stay behind."""
    first_S = torch.searchsorted(completions.prompt_index, torch.arange(len(prompts) + 1))
    return [
        ScoredGroup(prompt, *_slice(completions, rewards, int(first_S[i]), int(first_S[i + 1])))
        for i, prompt in enumerate(prompts.prompts)
    ]


def join(groups: Sequence[ScoredGroup]) -> tuple[PromptBatch, Completions, Rewards]:
    """Return the batch of these groups, in their order. They may have different weight versions."""
    parts, scored = [group.completions for group in groups], [group.rewards for group in groups]
    steps = [each.steps for each in scored if each.steps is not None]
    completions = Completions(
        prompt_index=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(part) for part in parts])),
        tokens=torch.cat([part.tokens for part in parts]),
        offsets=torch.nn.functional.pad(torch.cat([part.lengths for part in parts]).cumsum(0), (1, 0)),
        logprobs=torch.cat([part.logprobs for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
        texts=tuple(text for part in parts for text in part.texts),
        weight_version=min((part.weight_version for part in parts if len(part)), default=0),
        versions=_versions(parts),
        floors=_floors(parts),
    )
    rewards = Rewards(
        total=torch.cat([each.total for each in scored]),
        valid=torch.cat([each.valid for each in scored]),
        per_function={name: torch.cat([each.per_function[name] for each in scored]) for name in scored[0].per_function},
        extras=_extras(scored),
        steps=join_steps(steps) if len(steps) == len(groups) else None,
    )
    return PromptBatch(tuple(group.prompt for group in groups)), completions, rewards


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


def _slice(completions: Completions, rewards: Rewards, first: int, end: int) -> tuple[Completions, Rewards]:
    """Return responses `first` to `end`, all of one prompt, as copies."""
    tokens = slice(int(completions.offsets[first]), int(completions.offsets[end]))

    def part(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[tokens].clone()

    group = replace(
        completions,
        prompt_index=torch.zeros(end - first, dtype=torch.int64),
        tokens=completions.tokens[tokens].clone(),
        offsets=completions.offsets[first : end + 1] - completions.offsets[first],
        logprobs=completions.logprobs[tokens].clone(),
        finished=completions.finished[first:end].clone(),
        texts=completions.texts[first:end],
        versions=part(completions.versions),
        floors=part(completions.floors),
        late=None,
        dropped={},
    )
    scored = Rewards(
        total=rewards.total[first:end].clone(),
        valid=rewards.valid[first:end].clone(),
        per_function={name: values[first:end].clone() for name, values in rewards.per_function.items()},
        extras=rewards.extras[first:end],
        steps=None if rewards.steps is None else rewards.steps.of_responses(first, end),
    )
    return group, scored


def _versions(parts: Sequence[Completions]) -> torch.Tensor | None:
    """Return [R] int64: the weight version of each token; None if one version sampled them all."""
    if all(part.versions is None for part in parts) and len({part.weight_version for part in parts if len(part)}) < 2:
        return None
    return torch.cat([torch.full_like(p.tokens, p.weight_version) if p.versions is None else p.versions for p in parts])


def _floors(parts: Sequence[Completions]) -> torch.Tensor | None:
    """Return [R] fp32: the floor of each token, of a group sampled without filters -inf; None if all were."""
    if all(part.floors is None for part in parts):
        return None
    return torch.cat([torch.full_like(p.logprobs, -math.inf) if p.floors is None else p.floors for p in parts])


def _extras(scored: Sequence[Rewards]) -> tuple[Mapping[str, Any], ...]:
    extras = [extra for each in scored for extra in each.extras or ({},) * len(each.total)]
    return tuple(extras) if any(extras) else ()


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
