"""Groups whose rewards differ (`algorithm.filter_groups`, DAPO's dynamic sampling).

A step samples rounds of prompts until enough groups have passed, counted over all ranks in the order of the data: the
same groups are trained in the same updates on any number of ranks.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from hwgrpo.config.derived import prompts_per_update, sampling_by_step
from hwgrpo.config.schema import RolloutConfig
from hwgrpo.observe.completions import dropped_records
from hwgrpo.rewards.randomness import kept_generators
from hwgrpo.training.feed.difficulty_report import report_groups
from hwgrpo.training.feed.group_files import newest
from hwgrpo.training.feed.response_source import Batch, SourceParts
from hwgrpo.training.feed.scored_groups import (
    KeptGroups,
    PlacedGroup,
    ScoredGroup,
    join,
    metric_values,
    passes,
    split,
    spread,
)
from hwgrpo.training.strategies.strategy import Ranks, raise_on_all_ranks
from hwgrpo.training.update.advantage_inputs import shuffle_group

T = TypeVar("T")

REPLAY_STREAM = 2**32
"""Offset of the replay's random numbers from those of the data order, which have the same seed."""


@dataclass
class RoundTotals:
    """What the rounds of a step have sampled."""

    rounds: int = 0
    sampled: int = 0
    """Groups, over all ranks."""
    passed: int = 0
    """Groups that passed, over all ranks."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over all ranks: response `tokens`, `valid` responses and their `reward`, `late` and `dropped` groups."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """This rank's seconds per stage, `gen` and `reward`."""
    versions: list[int] = field(default_factory=list)
    """Versions of the weights that sampled, over all ranks."""
    failures: Counter[str] = field(default_factory=Counter)
    """This rank's, as in `Rewards`."""
    first_failures: dict[str, str] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Records of this rank's groups that were dropped for being late."""

    def next_round(self, missing: int, most: int) -> int:
        """Return how many prompts to sample for `missing` groups at the share that has passed, at most `most`."""
        if not self.sampled:
            return min(missing, most)
        return min(most, -(-missing * self.sampled // self.passed)) if self.passed else most


class FilteredGroups:
    """Collects a step's groups: leaves some out and samples others; see `Collector` for the methods.

    Args:
        parts: the run's parts; all ranks call `collect` together.
        ranks: the ranks, for the thread that collects.
    """

    exchanges = True

    def __init__(self, parts: SourceParts, ranks: Ranks) -> None:
        self._parts, self._config, self._ranks = parts, parts.config.algorithm.filter_groups, ranks
        self._sampling = sampling_by_step(parts.config, parts.total_steps)
        self._notes: list[str] = []
        self._reported = False
        kept = parts.prefetched[-1].kept if parts.prefetched else parts.kept
        surplus = kept.surplus if self._config.keep_surplus else ()  # the settings may be others than when it was kept
        self.kept = KeptGroups(surplus, tuple(newest(kept.replay, self._config.replay_groups)))

    def collect(self, step: int) -> Batch:
        wanted = self._parts.config.trainer.prompts_per_step
        passed, failed, totals = [*self.kept.surplus], list[PlacedGroup](), RoundTotals()
        while len(passed) < wanted and totals.rounds < self._config.max_rounds:
            count = totals.next_round(wanted - len(passed), wanted)
            for group, ok in self._sample(step, count, totals):
                (passed if ok else failed).append(group)
            failed = failed[:wanted]
        surplus = passed[wanted:] if self._config.keep_surplus else []
        passed = passed[:wanted]
        replayed = self._draw_replay(step, wanted - len(passed))
        self.kept = KeptGroups(tuple(surplus), tuple(newest([*self.kept.replay, *passed], self._config.replay_groups)))
        filling = failed[: wanted - len(passed) - len(replayed)]
        if filling and not self._reported:
            self._reported = True
            self._notes.append(
                f"step {step}: {len(passed)} of {wanted} groups passed algorithm.filter_groups in {totals.rounds} "
                f"rounds of sampling ({totals.sampled} prompts); {len(replayed)} replayed groups and {len(filling)} "
                "that did not pass fill it; filter_groups/filled_ratio counts further ones"
            )
        chosen = [*passed, *replayed, *filling]
        prompts, completions, rewards = join(self._exchange(chosen))
        oldest = min(each.version for each in chosen)
        metrics = self._metrics(totals) | {
            "filter_groups/replayed_ratio": len(replayed) / wanted,
            "filter_groups/filled_ratio": len(filling) / wanted,
            "filter_groups/staleness_max": float(step - 1 - oldest),
        }
        notes, self._notes = tuple(self._notes), []
        return Batch(
            prompts,
            completions,
            metrics,
            rewards=replace(rewards, failures=dict(totals.failures), first_failures=totals.first_failures),
            sampled_with=(min(totals.versions, default=step - 1), max(totals.versions, default=step - 1)),
            notes=notes,
            dropped=totals.dropped,
        )

    def resample(self, step: int, batch: Batch) -> Batch | None:
        return None

    def _sample(self, step: int, count: int, totals: RoundTotals) -> list[tuple[PlacedGroup, bool]]:
        """Sample and score one round of `count` prompts over all ranks; return its groups and whether they passed."""
        prompts, own = raise_on_all_ranks(self._ranks, lambda: self._parts.prompts.draw(count))
        start = time.perf_counter()
        completions = raise_on_all_ranks(
            self._ranks, lambda: self._parts.engine.generate(prompts, self._sampling(step))
        )
        generated = time.perf_counter()
        totals.rounds += 1

        def score() -> list[tuple[ScoredGroup, torch.Tensor]]:
            if not own:
                return []
            drawing = ("step", step, "round", totals.rounds)
            with generators_of_thread(self._parts.config.rollout):
                rewards = self._parts.rewards.score(prompts, completions, step, drawing=drawing)
            totals.failures.update(rewards.failures)
            totals.first_failures = dict(rewards.first_failures) | totals.first_failures
            groups = split(prompts, completions, rewards)
            if self._parts.config.reward.shuffle:
                groups = [self._shuffled(group) for group in groups]
            totals.dropped += dropped_records(prompts, completions)
            failed = bool(rewards.failures)
            return [(group, metric_values(group, self._config.metric, may_lack=failed)) for group in groups]

        scored = raise_on_all_ranks(self._ranks, score)
        report_groups(self._parts.prompts, self._ranks, [group for group, _ in scored])
        totals.seconds["gen"] += generated - start
        totals.seconds["reward"] += time.perf_counter() - generated
        sums: dict[str, float] = {"late": completions.late or 0, "dropped": len(completions.dropped)} if own else {}
        sums["tokens"] = sum(len(group.completions.tokens) for group, _ in scored)
        sums["valid"] = sum(int(group.rewards.valid.sum()) for group, _ in scored)
        sums["reward"] = sum(float(group.rewards.total[group.rewards.valid].sum()) for group, _ in scored)
        described = [(passes(values, self._config), spread(values), _version(group)) for group, values in scored]
        round_groups: list[tuple[PlacedGroup, bool]] = []
        sampled_with = [completions.weight_version, completions.newest_version] if own else []
        for rank, (of_rank, sums_of_rank, versions) in enumerate(
            self._ranks.gather_objects((described, sums, sampled_with))
        ):
            totals.versions += versions
            for name, value in sums_of_rank.items():
                totals.sums[name] += value
            for i, (ok, std, version) in enumerate(of_rank):
                group = scored[i][0] if rank == self._ranks.rank else None
                round_groups.append((PlacedGroup(rank, std, version, group), ok))
        totals.sampled += len(round_groups)
        totals.passed += sum(ok for _, ok in round_groups)
        return round_groups

    def _shuffled(self, group: ScoredGroup) -> ScoredGroup:
        return replace(group, rewards=shuffle_group(group.rewards, self._parts.config.trainer.seed, group.prompt.uid))

    def _draw_replay(self, step: int, count: int) -> list[PlacedGroup]:
        """Draw at most `count` groups of earlier steps without replacement, in proportion to their deviations."""
        if count <= 0 or not self.kept.replay:
            return []
        key = [self._parts.config.trainer.seed, REPLAY_STREAM + step]
        uniform = (np.random.Philox(key=key).random_raw(len(self.kept.replay)) >> 11) * 2.0**-53
        # the smallest of exponential variates with these rates: Efraimidis and Spirakis 2006
        arrival = -np.log1p(-uniform) / [max(each.std, 1e-30) for each in self.kept.replay]
        return [self.kept.replay[i] for i in sorted(np.argsort(arrival, kind="stable")[:count].tolist())]

    def _exchange(self, groups: Sequence[PlacedGroup]) -> list[ScoredGroup]:
        """Return this rank's groups of a step, from wherever they are."""
        rank, per_update = self._ranks.rank, prompts_per_update(self._parts.config)
        share = per_update // self._ranks.world_size
        trained_on = [i % per_update // share for i in range(len(groups))]
        moved: dict[int, ScoredGroup] = {}
        if any(each.home != target for each, target in zip(groups, trained_on, strict=True)):
            leaving = {i: each.group for i, each in enumerate(groups) if rank == each.home != trained_on[i]}
            for arriving in self._ranks.gather_objects(leaving):
                moved |= arriving
        own = [moved.get(i, each.group) for i, each in enumerate(groups) if trained_on[i] == rank]
        return [group for group in own if group is not None]

    def _metrics(self, totals: RoundTotals) -> dict[str, float]:
        sums, others = totals.sums, {**self._parts.engine.metrics, **self._parts.prompts.sampler.metrics}
        metrics = {f"timing_s/{stage}": seconds for stage, seconds in totals.seconds.items()}
        metrics["filter_groups/rounds"] = float(totals.rounds)
        metrics["filter_groups/sampled"] = float(totals.sampled)
        metrics["filter_groups/response_tokens"] = sums["tokens"]
        if totals.sampled:
            metrics["filter_groups/passed_ratio"] = totals.passed / totals.sampled
        if sums["valid"]:
            metrics["filter_groups/reward"] = sums["reward"] / sums["valid"]
        if self._parts.config.rollout.group_timeout is not None:
            metrics |= {"rollout/groups_late": sums["late"], "rollout/groups_dropped": sums["dropped"]}
        return others | metrics


def generators_of_thread(rollout: RolloutConfig) -> AbstractContextManager[Any]:
    """Return a context for scoring, which leaves random numbers alone where a thread scores beside the training."""
    return kept_generators() if rollout.max_staleness else nullcontext()


def _version(group: ScoredGroup) -> int:
    return group.completions.weight_version
