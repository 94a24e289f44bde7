"""Reports how hard the sampled prompts were to a sampler that sets prompts aside (`data.difficulty`)."""

from __future__ import annotations

from collections.abc import Sequence

from hwgrpo.data.difficulty import DifficultySampler, epoch_and_row
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.scored_groups import ScoredGroup, split
from hwgrpo.training.strategies.strategy import Ranks
from hwgrpo.values import Completions, PromptBatch, Rewards


def report_batch(
    source: PromptSource, ranks: Ranks, prompts: PromptBatch, completions: Completions, rewards: Rewards
) -> None:
    """Report this rank's scored batch; all ranks call it together."""
    if isinstance(source.sampler, DifficultySampler):
        report_groups(source, ranks, split(prompts, completions, rewards))


def report_groups(source: PromptSource, ranks: Ranks, groups: Sequence[ScoredGroup]) -> None:
    """Report this rank's groups; all ranks call it together. Groups without a valid reward say nothing."""
    if isinstance(source.sampler, DifficultySampler):
        own = {
            epoch_and_row(group.prompt.uid): float(group.rewards.total[group.rewards.valid].mean())
            for group in groups
            if group.rewards.valid.any()
        }
        over_ranks = {key: mean for of_rank in ranks.gather_objects(own) for key, mean in of_rank.items()}
        source.sampler.report({row: over_ranks[epoch, row] for epoch, row in sorted(over_ranks)})
