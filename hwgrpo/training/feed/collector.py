"""How the responses of a step are collected: drawn and sampled as they are, or filtered; with greedy ones beside them.

A source decides when: on demand, or in a thread beside the training of earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config.derived import sampling_by_step, sampling_of
from hwgrpo.config.rollout_rules import scores_ahead
from hwgrpo.rewards.randomness import kept_generators
from hwgrpo.training.feed.difficulty_report import report_batch
from hwgrpo.training.feed.group_filter import FilteredGroups, generators_of_thread
from hwgrpo.training.feed.response_source import Batch, Collector, SourceParts
from hwgrpo.training.feed.scored_groups import NO_GROUPS, KeptGroups
from hwgrpo.training.strategies.strategy import Ranks, raise_on_all_ranks
from hwgrpo.training.update.advantage_inputs import shuffle_rewards
from hwgrpo.training.update.greedy_rewards import with_greedy_rewards
from hwgrpo.values import Completions, PromptBatch, Rewards


def make_collector(parts: SourceParts, ranks: Ranks) -> Collector:
    """Return the collector that the settings ask for.

    Args:
        parts: the run's parts.
        ranks: the ranks, for the thread that collects.
    """
    config = parts.config
    if config.algorithm.filter_groups.enable:
        collector: Collector = FilteredGroups(parts, ranks)
    else:
        collector = DrawnGroups(parts, ranks)
    return WithGreedy(collector, parts) if takes(config.algorithm.advantage, "greedy_S") else collector


class DrawnGroups:
    """Samples responses to the next prompts of the data. Its prefetched batches are scored if the next prompts need it.

    Args:
        parts: the run's parts.
        ranks: the ranks, for the thread that collects.
    """

    kept: KeptGroups = NO_GROUPS

    def __init__(self, parts: SourceParts, ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        self._sampling = sampling_by_step(parts.config, parts.total_steps)
        self.exchanges = scores_ahead(parts.config) is not None  # on demand, a step's own stages score in time

    def collect(self, step: int) -> Batch:
        def sample() -> tuple[PromptBatch, Completions]:
            prompts = self._parts.prompts.next()
            return prompts, self._parts.engine.generate(prompts, self._sampling(step))

        prompts, completions = raise_on_all_ranks(self._ranks, sample) if self.exchanges else sample()
        batch = Batch(prompts, completions, {**self._parts.engine.metrics, **self._parts.prompts.sampler.metrics})
        return self._scored(batch, step) if self.exchanges else batch

    def resample(self, step: int, batch: Batch) -> Batch | None:
        if self.exchanges:
            return None
        completions = self._parts.engine.generate(batch.prompts, self._sampling(step))
        return replace(batch, completions=completions, metrics=dict(self._parts.engine.metrics))

    def _scored(self, batch: Batch, step: int) -> Batch:
        def score() -> Rewards:
            with kept_generators():
                return self._parts.rewards.score(batch.prompts, batch.completions, step)

        rewards = raise_on_all_ranks(self._ranks, score)
        if self._parts.config.reward.shuffle:
            rewards = shuffle_rewards(rewards, self._parts.config.trainer.seed, step, self._ranks.rank)
        report_batch(self._parts.prompts, self._ranks, batch.prompts, batch.completions, rewards)
        return replace(batch, rewards=rewards)


@dataclass
class WithGreedy:
    """Adds a greedy response to each prompt, by the same weights.

    Args:
        collector: collects the batches.
        parts: the run's parts.
    """

    collector: Collector
    parts: SourceParts

    @property
    def exchanges(self) -> bool:
        return self.collector.exchanges

    @property
    def kept(self) -> KeptGroups:
        return self.collector.kept

    def collect(self, step: int) -> Batch:
        return self._with_greedy(self.collector.collect(step), step)

    def resample(self, step: int, batch: Batch) -> Batch | None:
        again = self.collector.resample(step, batch)
        return None if again is None else self._with_greedy(again, step)

    def _with_greedy(self, batch: Batch, step: int) -> Batch:
        sampling = replace(sampling_of(self.parts.config), n=1, greedy=True)
        greedy = self.parts.engine.generate(batch.prompts, sampling)
        rewards = batch.rewards
        if rewards is not None:
            with generators_of_thread(self.parts.config.rollout):
                rewards = with_greedy_rewards(
                    self.parts.rewards, batch.prompts, batch.completions, greedy, rewards, step
                )
        return replace(batch, greedy=greedy, rewards=rewards)
