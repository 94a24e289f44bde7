"""Groups without a signal are left out and others sampled: the same ones on any number of ranks, and after a resume."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hwgrpo.config.load import to_yaml
from hwgrpo.config.schema import FilterGroupsConfig
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed import group_files
from hwgrpo.training.feed.group_filter import FilteredGroups, RoundTotals
from hwgrpo.training.feed.on_demand import OnDemand
from hwgrpo.training.feed.prompt_source import PromptSource
from hwgrpo.training.feed.scored_groups import (
    NO_GROUPS,
    KeptGroups,
    PlacedGroup,
    ScoredGroup,
    join,
    metric_values,
    passes,
    split,
)
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards
from tests.support.runs import runs

N = 3
ROWS = 23
CORRECTED = ("algorithm.correction.name=token_truncate",)


def prompt(row: int, epoch: int = 0) -> Prompt:
    return Prompt(f"{epoch}:{row}", f"row {row}", (row, row + 1), row, {"row": row})


def has_signal(row: int) -> bool:
    return row % 3 == 1


class Dataset:
    def __len__(self) -> int:
        return ROWS

    def prompt(self, row: int, epoch: int) -> Prompt:
        return prompt(row, epoch)


class Engine:
    """Responds with as many tokens as the row and the sample say, and records its calls."""

    def __init__(self) -> None:
        self.version, self.batches, self.metrics = 0, [], {}

    def generate(self, batch: PromptBatch, sampling: Any) -> Completions:
        self.batches.append([p.uid for p in batch.prompts])
        lengths = torch.tensor([1 + (p.ground_truth + i) % 4 for p in batch.prompts for i in range(N)])
        rows = torch.tensor([p.ground_truth for p in batch.prompts for _ in range(N)])
        tokens = torch.repeat_interleave(rows, lengths) * 10
        return Completions(
            prompt_index=torch.arange(len(batch)).repeat_interleave(N),
            tokens=tokens,
            offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            logprobs=-tokens.float() / 100,
            finished=lengths < 4,
            texts=tuple(f"{p.uid} {i}" for p in batch.prompts for i in range(N)),
            weight_version=self.version,
        )

    def update_weights(self, version: int) -> None:
        self.version = version


class Scorer:
    """Gives the samples of rows with a signal different rewards, and records the batches that it draws numbers for."""

    names = ("half",)

    def __init__(self, signal=has_signal) -> None:
        self.signal, self.drawn = signal, []

    def score(self, prompts: PromptBatch, completions: Completions, step: int, *, drawing: Any) -> Rewards:
        self.drawn.append(drawing)
        rows = [prompts.prompts[i].ground_truth for i in completions.prompt_index.tolist()]
        total = torch.tensor([row + (i % N) * self.signal(row) for i, row in enumerate(rows)], dtype=torch.float64)
        extras = tuple({"acc": float(i % N % 2), "text": "x"} for i in range(len(rows)))
        return Rewards(total, torch.ones(len(rows), dtype=torch.bool), {"half": total / 2}, extras=extras)


class Together:
    """Ranks as threads that exchange objects."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.slots = threading.Barrier(ranks, timeout=30), [None] * ranks

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        gathered = list(self.slots)
        self.barrier.wait()
        return gathered


@dataclass
class Rank:
    rank: int
    world_size: int
    together: Together

    def gather_objects(self, value: Any) -> list[Any]:
        return self.together.gather(self.rank, value)


def settings(tmp_path: Path, *overrides: str, prompts: int = 8):
    every = (f"trainer.prompts_per_step={prompts}", f"rollout.n={N}", "algorithm.filter_groups.enable=true")
    return runs.small(tmp_path, *every, *overrides)


class Source(OnDemand):
    """The source of a rank, and what was noted when its groups were loaded."""

    collector: FilteredGroups
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> Any:
        return self.collector._parts

    @property
    def surplus(self) -> list[Any]:
        return [*self.collector.kept.surplus]

    @property
    def replay(self) -> list[Any]:
        return [*self.collector.kept.replay]


def source(
    config, rank: Rank, checkpoint: Checkpoint | None = None, signal=has_signal, scorer: Any = None, engine: Any = None
) -> Source:
    t = config.trainer
    sampler = PromptSampler(ROWS, t.seed)
    per_update = t.prompts_per_update or t.prompts_per_step
    prompts = PromptSource(Dataset(), sampler, t.prompts_per_step, per_update, rank.rank, rank.world_size)  # type: ignore[arg-type]
    rewards, kept, notes = scorer or Scorer(signal), NO_GROUPS, []
    if checkpoint is not None:
        prompts.restore(checkpoint.manifest["state"]["sampler"])
        kept, notes = group_files.load(checkpoint, prompts.dataset, rewards.names, config, rank)
    parts: Any = SimpleNamespace(
        config=config,
        total_steps=9,
        prompts=prompts,
        engine=engine or Engine(),
        rewards=rewards,
        prefetched=(),
        kept=kept,
    )
    made = Source(FilteredGroups(parts, rank), prompts, parts.engine)
    made.notes = tuple(notes)
    return made


@dataclass
class Done:
    """What a rank had of some steps: the groups of each update, metrics, notes, files and position in the data."""

    steps: list[list[list[tuple]]]
    metrics: list[dict]
    notes: list[tuple[str, ...]]
    files: dict
    state: dict
    source: Source


def content(group: ScoredGroup) -> tuple:
    """Return everything in a group, as plain values."""
    c, r = group.completions, group.rewards
    versions = [c.weight_version] * len(c.tokens) if c.versions is None else c.versions.tolist()
    parts = {name: values.tolist() for name, values in r.per_function.items()}
    return (
        group.prompt.uid,
        c.tokens.tolist(),
        c.logprobs.tolist(),
        c.texts,
        versions,
        r.total.tolist(),
        parts,
        r.extras,
    )


def run(config, ranks: int, steps: range, checkpoint: Checkpoint | None = None, signal=has_signal) -> list[Done]:
    together, done = Together(ranks), [None] * ranks

    def body(rank: int) -> None:
        responses = source(config, Rank(rank, ranks, together), checkpoint, signal)
        t = config.trainer
        share = (t.prompts_per_update or t.prompts_per_step) // ranks
        seen, metrics, notes = [], [], []
        responses.update_weights(steps.start - 1)
        for step in steps:
            batch = responses.next(step)
            assert batch.rewards is not None
            groups = [content(each) for each in split(batch.prompts, batch.completions, batch.rewards)]
            seen.append([groups[first : first + share] for first in range(0, len(groups), share)])
            metrics.append({k: v for k, v in batch.metrics.items() if not k.startswith("timing_s/")})
            notes.append(batch.notes)
            responses.update_weights(step)
        done[rank] = Done(seen, metrics, notes, responses.files(), responses.state(), responses)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(done), "a rank failed"
    return done  # type: ignore[return-value]


def over_ranks(done: list[Done]) -> list[list[list[tuple]]]:
    """Return the groups of every update of every step, over all ranks."""
    return [
        [[group for part in update for group in part] for update in zip(*(rank.steps[i] for rank in done), strict=True)]
        for i in range(len(done[0].steps))
    ]


def saved(folder: Path, done: list[Done], step: int) -> Checkpoint:
    files = {}
    folder.mkdir()
    for rank in done:
        for name, tensors in rank.files.items():
            checkpoint_files.write_tensors(folder / name, tensors)
            files[name] = {}
    state = {"sampler": done[0].state, "config": to_yaml(done[0].source.parts.config)}
    return Checkpoint(folder, {"step": step, "world_size": len(done), "files": files, "state": state})


def rows_of(step: list[list[tuple]]) -> list[int]:
    return [int(group[0].split(":")[1]) for update in step for group in update]


KINDS = {
    "discarded": (),
    "surplus": ("algorithm.filter_groups.keep_surplus=true", *CORRECTED),
    "replayed": ("algorithm.filter_groups.replay_groups=10", "algorithm.filter_groups.max_rounds=2", *CORRECTED),
    "shuffled": ("reward.shuffle=true",),
    "filled": ("algorithm.filter_groups.max_rounds=1",),
    "two updates": ("trainer.prompts_per_update=4", "algorithm.filter_groups.keep_surplus=true", *CORRECTED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_the_same_groups_in_the_same_updates(kind: str, tmp_path: Path):
    config = settings(tmp_path, *KINDS[kind])
    one, two, four = (run(config, ranks, range(1, 5)) for ranks in (1, 2, 4))
    assert over_ranks(one) == over_ranks(two) == over_ranks(four)
    assert one[0].state == two[1].state == four[3].state
    assert one[0].metrics == two[0].metrics == two[1].metrics == four[2].metrics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 4), (4, 2)])
def test_a_resumed_run_goes_on_with_the_same_groups(kind: str, before: int, after: int, tmp_path: Path):
    config = settings(tmp_path, *KINDS[kind])
    whole = over_ranks(run(config, 1, range(1, 6)))
    for cut in (1, 3):
        first = run(config, before, range(1, cut + 1))
        checkpoint = saved(tmp_path / f"{cut}", first, cut)
        rest = run(config, after, range(cut + 1, 6), checkpoint)
        assert over_ranks(first) + over_ranks(rest) == whole
        assert rest[0].notes[0] == () or kind in ("filled", "replayed"), "only what fills a step is reported again"


def test_only_groups_with_a_signal_are_trained_and_each_in_the_order_of_the_data(tmp_path: Path):
    config = settings(tmp_path)
    [done] = run(config, 1, range(1, 4))
    order = PromptSampler(ROWS, config.trainer.seed)
    for step, metrics in zip(done.steps, done.metrics, strict=True):
        assert len(rows_of(step)) == 8
        assert all(map(has_signal, rows_of(step)))
        assert metrics["filter_groups/passed_ratio"] < 0.6
        assert metrics["filter_groups/filled_ratio"] == metrics["filter_groups/replayed_ratio"] == 0
    sampled = [uid for batch in done.source.parts.engine.batches for uid in batch]
    assert len(sampled) == sum(m["filter_groups/sampled"] for m in done.metrics)
    assert sampled == [f"{epoch}:{row}" for epoch, row in order.take(len(sampled))]
    assert rows_of(done.steps[0]) == [row for row in (int(u.split(":")[1]) for u in sampled) if has_signal(row)][:8]


def test_surplus_is_trained_in_the_next_step_before_anything_new_and_shows_its_age(tmp_path: Path):
    config = settings(tmp_path, *KINDS["surplus"])
    [kept] = run(config, 1, range(1, 7))
    [gone] = run(settings(tmp_path), 1, range(1, 7))
    sampled = [uid for batch in kept.source.parts.engine.batches for uid in batch]
    trained = [group[0] for step in kept.steps for update in step for group in update]
    assert trained == [uid for uid in sampled if has_signal(int(uid.split(":")[1]))][: len(trained)], "none is lost"
    assert {m["filter_groups/staleness_max"] for m in kept.metrics} == {0, 1}
    assert {m["filter_groups/staleness_max"] for m in gone.metrics} == {0}
    assert sum(m["filter_groups/sampled"] for m in kept.metrics) < sum(m["filter_groups/sampled"] for m in gone.metrics)
    stale = next(i for i, m in enumerate(kept.metrics) if m["filter_groups/staleness_max"])
    versions = [group[4][0] for update in kept.steps[stale] for group in update]
    assert set(versions) == {stale - 1, stale}


def test_replayed_groups_fill_a_step_in_proportion_to_their_deviation_and_others_only_after_them(tmp_path: Path):
    config = settings(tmp_path, *KINDS["replayed"])
    [done] = run(config, 1, range(1, 7))
    fills = [(m["filter_groups/replayed_ratio"], m["filter_groups/filled_ratio"]) for m in done.metrics]
    assert fills[0][0] == 0
    assert fills[0][1] > 0, "there is nothing to replay in the first step"
    assert max(replayed for replayed, _ in fills[2:]) > 0
    assert all(filled == 0 for _, filled in fills[2:])
    assert max(m["filter_groups/staleness_max"] for m in done.metrics) >= 1
    note = done.notes[0][0]
    assert note.startswith("step 1: ")
    assert "8 groups passed algorithm.filter_groups in 2 rounds of sampling" in note
    assert [len(notes) for notes in done.notes[1:]] == [0] * 5, "reported once"
    spread_out: Any = tuple(SimpleNamespace(std=9.0 if i < 5 else 1e-9) for i in range(10))
    source_ = done.source.collector
    source_.kept = KeptGroups(replay=spread_out)
    assert {id(each) for each in source_._draw_replay(3, 5)} == {id(each) for each in spread_out[:5]}
    drawn = [tuple(id(each) for each in source_._draw_replay(step, 3)) for step in range(8)]
    assert len(set(drawn)) > 1
    assert drawn == [tuple(id(each) for each in source_._draw_replay(step, 3)) for step in range(8)]


def test_without_any_signal_the_step_is_the_first_prompts_and_the_rounds_end(tmp_path: Path):
    config = settings(tmp_path, "algorithm.filter_groups.max_rounds=4")
    [done] = run(config, 1, range(1, 2), signal=lambda row: False)
    first = [f"{epoch}:{row}" for epoch, row in PromptSampler(ROWS, config.trainer.seed).take(8)]
    assert [group[0] for update in done.steps[0] for group in update] == first
    assert done.metrics[0]["filter_groups/rounds"] == 4
    assert done.metrics[0]["filter_groups/filled_ratio"] == 1
    assert "0 of 8 groups passed" in done.notes[0][0]


def test_rounds_draw_what_is_missing_at_the_share_that_passed_and_never_more_than_a_step():
    totals = RoundTotals()
    assert totals.next_round(8, 8) == 8
    totals.sampled, totals.passed = 8, 4
    assert totals.next_round(3, 8) == 6
    assert totals.next_round(7, 8) == 8
    totals.passed = 3
    assert totals.next_round(1, 8) == 3
    totals.passed = 0
    assert totals.next_round(1, 8) == 8


def test_random_numbers_of_rewards_differ_between_rounds(tmp_path: Path):
    [done] = run(settings(tmp_path), 1, range(1, 3))
    drawn = done.source.parts.rewards.drawn
    assert len(drawn) == len(set(drawn)) > 2


def test_a_rank_without_a_prompt_in_a_round_generates_one_that_is_not_trained(tmp_path: Path):
    config = settings(tmp_path, prompts=4)
    done = run(config, 4, range(1, 4), signal=lambda row: row % 4 > 0)
    calls = [len(rank.source.parts.engine.batches) for rank in done]
    assert calls[0] > 3
    assert len(set(calls)) == 1
    asked = sum(len(batch) for rank in done for batch in rank.source.parts.engine.batches)
    sampled = sum(m["filter_groups/sampled"] for m in done[0].metrics)
    assert asked > sampled, "no round had fewer prompts than ranks"
    trained = [group[0] for step in over_ranks(done) for update in step for group in update]
    assert len(trained) == len(set(trained)) == 12


@pytest.mark.parametrize(
    ("values", "settings", "right"),
    [
        ([1.0, 1.0, 1.0], {}, False),
        ([1.0], {}, False),
        ([], {}, False),
        ([0.0, 1.0], {}, True),
        ([1.0, 1.0 + 1e-15], {}, True),
        ([0.0, 1.0], {"min_std": 0.49}, True),
        ([0.0, 1.0], {"min_std": 0.5}, False),
        ([0.0, 1.0], {"mean_above": 0.5}, False),
        ([0.0, 1.0], {"mean_above": 0.4, "mean_below": 0.6}, True),
        ([0.0, 1.0], {"mean_below": 0.5}, False),
    ],
)
def test_a_group_passes_where_its_values_differ_and_their_mean_is_in_range(values, settings, right):
    assert passes(torch.tensor(values, dtype=torch.float64), FilterGroupsConfig(enable=True, **settings)) is right


def group_of(row: int = 1, version: int = 0) -> ScoredGroup:
    engine, prompts = Engine(), PromptBatch((prompt(row),))
    engine.version = version
    completions = engine.generate(prompts, None)
    return split(prompts, completions, Scorer().score(prompts, completions, 1, drawing=None))[0]


def test_the_metric_is_the_reward_a_function_or_a_field_beside_a_score():
    group = group_of()
    assert metric_values(group, "reward").tolist() == [1, 2, 3]
    assert metric_values(group, "half").tolist() == [0.5, 1, 1.5]
    assert metric_values(group, "acc").tolist() == [0, 1, 0]
    group.rewards.valid[1] = False
    group.rewards.per_function["half"][2] = torch.nan
    assert metric_values(group, "reward").tolist() == [1, 3]
    assert metric_values(group, "half").tolist() == [0.5]
    for metric in ("hald", "text"):
        with pytest.raises(ConfigError, match=f"filter_groups.metric='{metric}' .* reward, half, acc, text"):
            metric_values(group, metric)


def test_groups_of_a_batch_join_to_the_batch():
    engine, prompts = Engine(), PromptBatch(tuple(prompt(row) for row in (4, 1, 7)))
    completions = engine.generate(prompts, None)
    rewards = Scorer().score(prompts, completions, 1, drawing=None)
    again, joined, scored = join(split(prompts, completions, rewards))
    assert again == prompts
    for name in ("prompt_index", "tokens", "offsets", "logprobs", "finished"):
        assert torch.equal(getattr(joined, name), getattr(completions, name)), name
    assert joined.texts == completions.texts
    assert (joined.versions, joined.floors, joined.weight_version) == (None, None, 0)
    assert torch.equal(scored.total, rewards.total)
    assert torch.equal(scored.per_function["half"], rewards.per_function["half"])
    assert scored.extras == rewards.extras


def test_joined_groups_of_several_versions_have_one_per_token():
    old, new = group_of(1, version=3), group_of(4, version=5)
    _, joined, _ = join([old, new])
    assert joined.weight_version == 3
    assert joined.newest_version == 5
    assert joined.versions is not None
    assert joined.versions.tolist() == [3] * len(old.completions.tokens) + [5] * len(new.completions.tokens)


def test_groups_sampled_without_filters_keep_all_tokens_beside_groups_with_them():
    with_floors, without = group_of(1), group_of(4)
    floors = torch.linspace(-9, -5, len(with_floors.completions.tokens))
    with_floors = replace(with_floors, completions=replace(with_floors.completions, floors=floors))
    _, joined, _ = join([without, with_floors])
    assert joined.floors is not None
    assert joined.floors.dtype == torch.float32
    assert joined.floors.tolist() == [-torch.inf] * len(without.completions.tokens) + floors.tolist()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.filter_groups.keep_surplus=true"], "keep_surplus=true: .*algorithm.correction.name"),
        (["algorithm.filter_groups.replay_groups=4"], "replay_groups=4: .*algorithm.correction.name"),
        (
            ["algorithm.filter_groups.mean_above=1", "algorithm.filter_groups.mean_below=0.5"],
            "mean_above=1 must be below",
        ),
        (["rollout.n=1", "algorithm.advantage.singleton=raw"], "with rollout.n=1"),
        (["algorithm.filter_groups.max_rounds=0"], "max_rounds=0 is out of range"),
    ],
)
def test_what_cannot_be_filtered_is_refused_by_name(overrides, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, *overrides)


def test_filtering_without_the_filter_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rollout.source='filtered' with algorithm.filter_groups.enable=false"):
        runs.small(tmp_path, "rollout.source=filtered")
    with pytest.raises(ConfigError, match=r"filter_groups.max_rounds=3 has no effect"):
        runs.small(tmp_path, "algorithm.filter_groups.max_rounds=3")


def test_a_group_that_the_engine_dropped_is_replaced_and_counted(tmp_path: Path):
    class Dropping(Engine):
        def generate(self, batch: PromptBatch, sampling: Any) -> Completions:
            made = super().generate(PromptBatch(batch.prompts[1:]), sampling)
            index = made.prompt_index + 1
            return replace(made, prompt_index=index, late=2, dropped={0: "too late"})

    config = settings(tmp_path, "rollout.group_timeout=5")
    responses = source(config, Rank(0, 1, Together(1)), signal=lambda row: True, engine=Dropping())
    batch = responses.next(1)
    order = [f"{epoch}:{row}" for epoch, row in PromptSampler(ROWS, config.trainer.seed).take(10)]
    # the first prompt of the first round of 8, and of each of the further rounds, is dropped
    assert [p.uid for p in batch.prompts.prompts] == [*order[1:8], order[9]]
    assert batch.metrics["rollout/groups_dropped"] == 2
    assert batch.metrics["rollout/groups_late"] == 4
    assert batch.metrics["filter_groups/rounds"] == 2
    assert batch.completions.dropped == {}
    # those of all rounds
    assert [(each["uid"], each["dropped"]) for each in batch.dropped] == [(order[i], "too late") for i in (0, 8)]


def test_responses_whose_function_failed_lack_the_field_and_the_run_goes_on(tmp_path: Path):
    class Failing(Scorer):
        def __init__(self, policy: str) -> None:
            super().__init__()
            self.policy = policy

        def score(self, prompts, completions, step, *, drawing):
            rewards = super().score(prompts, completions, step, drawing=drawing)
            rewards.valid[0] = self.policy == "value"
            failures = {} if self.policy == "none" else {"timeouts/half": 1}
            return replace(rewards, extras=({}, *rewards.extras[1:]), failures=failures)

    def sampled(policy: str):
        config = settings(tmp_path, "algorithm.filter_groups.metric=acc")
        return source(config, Rank(0, 1, Together(1)), scorer=Failing(policy)).next(1)

    for policy in ("mask_sample", "value"):
        assert sampled(policy).metrics["filter_groups/passed_ratio"] == 1, "two responses of the group differ"
    group = group_of()
    lacking = replace(group, rewards=replace(group.rewards, extras=({}, *group.rewards.extras[1:])))
    with pytest.raises(ConfigError, match=r"filter_groups\.metric='acc'"):
        metric_values(lacking, "acc")


@pytest.mark.parametrize("make", [np.float32, np.int64, np.bool_, torch.tensor])
def test_a_field_of_a_library_is_a_metric_and_can_be_stored(make, tmp_path: Path):
    group = group_of()
    fields = tuple({"acc": make(i % 2), "nan": float("nan")} for i in range(N))
    group = replace(group, rewards=replace(group.rewards, extras=fields))
    assert metric_values(group, "acc").tolist() == [0, 1, 0]
    placed = PlacedGroup(0, 1.0, 0, group)
    [(name, tensors)] = group_files.files_of(KeptGroups(surplus=(placed,)), 0).items()
    checkpoint_files.write_tensors(tmp_path / name, tensors)
    checkpoint = Checkpoint(tmp_path, {"step": 1, "world_size": 1, "files": {name: {}}, "state": {}})
    config = settings(tmp_path)
    checkpoint.manifest["state"]["config"] = to_yaml(config)
    config.algorithm.filter_groups.keep_surplus = True
    one: Any = Rank(0, 1, Together(1))
    stored, notes = group_files.load(checkpoint, Dataset(), Scorer.names, config, one)  # type: ignore[arg-type]
    assert notes == []
    restored = stored.surplus[0].group
    assert restored is not None
    assert metric_values(restored, "acc").tolist() == [0, 1, 0]


def test_groups_that_other_reward_functions_scored_are_left_out_with_a_note(tmp_path: Path):
    class Renamed(Scorer):
        names = ("halved",)

        def score(self, prompts, completions, step, *, drawing):
            rewards = super().score(prompts, completions, step, drawing=drawing)
            return replace(rewards, per_function={"halved": rewards.per_function["half"]})

    config = settings(tmp_path, *KINDS["surplus"])
    before = run(config, 1, range(1, 2))
    kept = len(before[0].source.surplus)
    assert kept
    checkpoint = saved(tmp_path / "saved", before, 1)
    responses = source(config, Rank(0, 1, Together(1)), checkpoint, scorer=Renamed())
    batch = responses.next(2)
    assert batch.rewards is not None
    assert set(batch.rewards.per_function) == {"halved"}
    assert responses.notes == (f"{kept} groups {CHANGED}",)


CHANGED = "kept for later steps are left out: their prompts, reward functions or those functions' settings have changed"


@pytest.mark.parametrize(
    "changed",
    [
        *("reward.functions.0.weight=2", "reward.functions.0.kwargs={scale: 3}", "reward.shuffle=true"),
        "algorithm.advantage.name=process",  # it reads rewards of steps, which these lack
    ],
)
def test_groups_that_were_scored_by_other_settings_are_left_out_with_a_note(changed: str, tmp_path: Path):
    before = run(settings(tmp_path, *KINDS["surplus"]), 1, range(1, 2))
    kept = len(before[0].source.surplus)
    checkpoint = saved(tmp_path / "saved", before, 1)
    responses = source(settings(tmp_path, *KINDS["surplus"], changed), Rank(0, 1, Together(1)), checkpoint)
    assert responses.surplus == []
    assert responses.notes == (f"{kept} groups {CHANGED}",)


def test_a_resume_without_the_filter_says_how_many_groups_it_leaves_out(tmp_path: Path):
    both = (*KINDS["surplus"], "algorithm.filter_groups.replay_groups=10")
    before = run(settings(tmp_path, *both), 2, range(1, 2))
    kept = sum(each.group is not None for rank in before for each in (*rank.source.surplus, *rank.source.replay))
    assert kept > 8
    checkpoint = saved(tmp_path / "saved", before, 1)
    without = FilterGroupsConfig(enable=False)
    assert group_files.unused_note(checkpoint, without) == [
        f"{kept} groups kept for later steps are left out: algorithm.filter_groups.enable=false"
    ]
    assert group_files.unused_note(checkpoint, FilterGroupsConfig(enable=True)) == []
    assert group_files.unused_note(Checkpoint(tmp_path, {"world_size": 1, "files": {}}), without) == []


def test_a_resumed_run_with_another_field_as_metric_goes_on_with_its_groups(tmp_path: Path):
    before = run(settings(tmp_path, *KINDS["surplus"]), 1, range(1, 2))
    checkpoint = saved(tmp_path / "saved", before, 1)
    config = settings(tmp_path, *KINDS["surplus"], "algorithm.filter_groups.metric=new")
    responses = source(config, Rank(0, 1, Together(1)), checkpoint)
    assert len(responses.surplus) == len(before[0].source.surplus) > 0


def test_a_resumed_run_has_the_surplus_and_the_replay_of_its_own_settings(tmp_path: Path):
    both = (*KINDS["surplus"], "algorithm.filter_groups.replay_groups=10")
    before = run(settings(tmp_path, *both), 1, range(1, 2))
    checkpoint = saved(tmp_path / "saved", before, 1)
    replayed = [each.group.prompt.uid for each in before[0].source.replay]
    assert len(replayed) == 8
    surplus = len(before[0].source.surplus)
    assert surplus
    plain = source(settings(tmp_path), Rank(0, 1, Together(1)), checkpoint)
    assert (plain.surplus, plain.replay) == ([], [])
    assert plain.notes == (
        f"{surplus} groups kept for later steps are left out: algorithm.filter_groups.keep_surplus=false",
        "8 groups kept for later steps are left out: algorithm.filter_groups.replay_groups=0",
    )
    fewer = settings(tmp_path, *KINDS["surplus"], "algorithm.filter_groups.replay_groups=3")
    smaller = source(fewer, Rank(0, 1, Together(1)), checkpoint)
    assert [each.group.prompt.uid for each in smaller.replay if each.group] == replayed[-3:]
    assert smaller.notes == ("5 groups kept for later steps are left out: algorithm.filter_groups.replay_groups=3",)


@pytest.mark.parametrize("part", ["draw", "load"])
def test_a_rank_that_cannot_read_its_data_or_its_groups_ends_the_others(part: str, tmp_path: Path, monkeypatch):
    config = settings(tmp_path, *KINDS["surplus"])
    checkpoint = saved(tmp_path / "saved", run(config, 2, range(1, 2)), 1)
    together, raised = Together(2), {}

    def refuse(*_: Any) -> Any:
        raise DataError("row 3 cannot be read")

    load = group_files._stored
    monkeypatch.setattr(
        group_files,
        "_stored",
        lambda *a: refuse() if part == "load" and threading.current_thread().name == "1" else load(*a),
    )

    def body(rank: int) -> None:
        try:
            responses = source(config, Rank(rank, 2, together), checkpoint)
            if rank and part == "draw":
                responses.prompts.draw = refuse  # type: ignore[method-assign]
            raise_on_all_ranks(responses.collector._ranks, lambda: responses.next(2))
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), name=f"{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {rank: str(error) for rank, error in raised.items()} == dict.fromkeys(range(2), "row 3 cannot be read")
