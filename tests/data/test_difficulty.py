"""Prompts that were too easy or too hard are set aside, return now and then, and stay so after a resume."""

import json

import pytest

from hwgrpo.config.schema import DataConfig, DifficultyConfig
from hwgrpo.data.difficulty import DifficultySampler, make_sampler
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError
from tests.support.runs import runs

SIZE = 40


def sampler(**settings) -> DifficultySampler:
    thresholds = {"easy_threshold": 1.0, "hard_threshold": 0.0}
    return DifficultySampler(SIZE, 3, True, DifficultyConfig(**{**thresholds, **settings}))


def test_without_thresholds_the_order_is_the_plain_one():
    assert type(make_sampler(SIZE, 3, DataConfig())) is PromptSampler
    assert type(make_sampler(SIZE, 3, DataConfig(difficulty=DifficultyConfig(hard_threshold=0.0)))) is DifficultySampler


def test_rows_are_set_aside_by_their_last_mean_and_come_back_by_a_later_one():
    order = sampler(revisit=0.0)
    plain = PromptSampler(SIZE, 3).take(3 * SIZE)
    order.report({0: 1.0, 1: 0.0, 2: 0.5, 3: 2.0})
    assert order.metrics == {"data/set_aside_ratio": 3 / SIZE}
    drawn = order.take(2 * (SIZE - 3))
    assert drawn == [pair for pair in plain if pair[1] not in (0, 1, 3)][: len(drawn)]
    order.report({0: 0.5, 1: 0.0})
    assert {row for _, row in order.take(SIZE - 2)} == {*range(SIZE)} - {1, 3}


@pytest.mark.parametrize(("settings", "aside"), [({"easy_threshold": None}, {1}), ({"hard_threshold": None}, {0})])
def test_a_threshold_that_is_null_sets_nothing_aside(settings, aside):
    order = sampler(revisit=0.0, **settings)
    order.report({0: 1.0, 1: 0.0})
    assert {*range(SIZE)} - {row for _, row in order.take(SIZE - 1)} == aside


def test_a_share_of_visits_is_made_all_the_same_each_epoch_to_other_rows():
    order = sampler(revisit=0.25)
    order.report(dict.fromkeys(range(20), 1.0))
    drawn = order.take(40 * 25)
    visits = {epoch: {row for e, row in drawn if e == epoch and row < 20} for epoch, _ in drawn}
    rate = sum(len(rows) for rows in visits.values()) / (20 * len(visits))
    assert 0.2 < rate < 0.3
    assert len({frozenset(rows) for rows in visits.values()}) > len(visits) / 2


def test_where_everything_is_set_aside_the_data_still_has_an_end_and_a_beginning():
    order = sampler(revisit=0.0)
    order.report(dict.fromkeys(range(SIZE), 1.0))
    assert len(order.take(5)) == 5


def test_a_restored_sampler_goes_on_with_the_same_rows():
    order = sampler(revisit=0.3)
    order.take(17)
    order.report({row: row % 2 for row in range(SIZE)})
    again = sampler(revisit=0.3)
    again.restore(json.loads(json.dumps(order.state())))
    assert again.take(90) == order.take(90)
    assert again.metrics == order.metrics
    fresh = sampler()
    fresh.restore(PromptSampler(SIZE, 3).state())  # of a run that had no thresholds
    assert fresh.metrics == {"data/set_aside_ratio": 0.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.difficulty.hard_threshold=0.5", "data.difficulty.easy_threshold=0.5"],
            "hard_threshold=0.5 must be below",
        ),
        (
            ["data.difficulty.revisit=0.5"],
            r"data.difficulty.revisit=0.5 has no effect .*data.difficulty.easy_threshold",
        ),
    ],
)
def test_what_cannot_be_set_aside_is_refused_by_name(overrides, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        runs.small(tmp_path, *overrides)


def test_a_source_of_ones_own_that_may_draw_prompts_before_they_are_scored_is_refused(tmp_path):
    (tmp_path / "source.py").write_text("def source(parts): ...")
    with pytest.raises(ConfigError, match=r"source.py:source': the next prompts .* may draw them before"):
        runs.small(tmp_path, "data.difficulty.hard_threshold=0", f"rollout.source={tmp_path}/source.py:source")


FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_rounds=2")


@pytest.mark.parametrize("filtered", [(), FILTER], ids=["plain", "filtered"])
def test_a_run_sets_aside_what_gives_equal_rewards_and_resumes_to_the_same_numbers(filtered, tmp_path):
    words = (
        "data.max_rows=12",
        "data.difficulty.easy_threshold=0.9",
        "data.difficulty.hard_threshold=-0.05",
        "trainer.save_every=1",
        "trainer.validate_every=0",
        *filtered,
    )
    assert runs.run(tmp_path / "whole", *words) == "completed"
    shares = [line["data/set_aside_ratio"] for line in runs.metrics(tmp_path / "whole") if "actor/loss" in line]
    assert 0 < shares[-1] < 1
    assert len(set(shares)) > 2
    assert runs.run(tmp_path / "parts", *words, "trainer.max_steps=3") == "completed"
    assert runs.run(tmp_path / "parts", *words) == "completed"
    whole, parts = (runs.everything(tmp_path / each) for each in ("whole", "parts"))
    assert parts["weights"] == whole["weights"]
    assert parts["completions"] == whole["completions"]
