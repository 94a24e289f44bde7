"""Measuring a policy on held-out prompts: one greedy response each, and n sampled ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from hwgrpo.data.prompts import PromptDataset
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine, Sampling
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import PromptBatch

PROMPTS_AT_ONCE = 256


def scores(
    engine: Engine, dataset: PromptDataset, rewards: RewardPipeline, sampling: Sampling, rows: range
) -> tuple[torch.Tensor, list[str]]:
    """Generate and score.

    Args:
        engine: generates.
        dataset: the prompts.
        rewards: scores.
        sampling: n responses per prompt.
        rows: which prompts.

    Returns:
        [len(rows), n] fp64 total rewards (NaN where a failure policy took the sample out), and the prompts' sources.
    """
    parts: list[torch.Tensor] = []
    sources: list[str] = []
    for start in range(0, len(rows), PROMPTS_AT_ONCE):
        chosen = rows[start : start + PROMPTS_AT_ONCE]
        # epoch -1: validation prompts share no uid, and so no random numbers, with training prompts
        batch = PromptBatch(tuple(dataset.prompt(row, -1) for row in chosen))
        scored = rewards.score(batch, engine.generate(batch, sampling))
        total = torch.where(scored.valid, scored.total, torch.nan)
        parts.append(total.view(len(chosen), sampling.n))
        sources += [prompt.source for prompt in batch.prompts]
    return torch.cat(parts) if parts else torch.zeros(0, sampling.n, dtype=torch.float64), sources


def validate(
    engine: Engine,
    dataset: PromptDataset,
    rewards: RewardPipeline,
    sampling: Sampling,
    n: int,
    strategy: Strategy,
) -> dict[str, float]:
    """Return `val-core/<source>/reward/{greedy, mean@n, best@n}` over all prompts, shared out among the ranks.

    Args:
        engine: generates.
        dataset: validation prompts.
        rewards: scores.
        sampling: as in training; its n is replaced.
        n: sampled responses per prompt; 0 makes only greedy ones.
        strategy: gathers over ranks.
    """
    rows = range(strategy.rank, len(dataset), strategy.world_size)
    greedy, sources = scores(engine, dataset, rewards, replace(sampling, n=1, greedy=True), rows)
    collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    columns = {"greedy": greedy[:, 0]}
    if n > 0:
        sampled, _ = scores(engine, dataset, rewards, replace(sampling, n=n), rows)
        columns[f"mean@{n}"] = sampled.nanmean(1)
        columns[f"best@{n}"] = sampled.nan_to_num(nan=-torch.inf).amax(1)
    for name, values in columns.items():
        for source, value in zip(sources, values.tolist(), strict=True):
            collected[source][name].append(value)
    merged: dict[str, list[float]] = defaultdict(list)
    for part in strategy.gather_objects({f"{s}/reward/{k}": v for s, by in collected.items() for k, v in by.items()}):
        for key, values in part.items():
            merged[key] += values
    return {
        f"val-core/{key}": float(torch.tensor(values, dtype=torch.float64).nanmean()) for key, values in merged.items()
    }
