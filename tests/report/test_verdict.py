"""The verdict tells a change of the reward from its scatter."""

import pytest

from hwgrpo.report.verdict import verdict


def of(*rewards: float):
    return verdict({step: {"reward": reward} for step, reward in enumerate(rewards, start=1)})


def test_a_reward_that_climbs_rose_and_one_that_sinks_fell():
    climb = [0.1, 0.12, 0.11, 0.2, 0.3, 0.5, 0.6, 0.62, 0.61, 0.63]
    assert of(*climb)["word"] == "rose"
    assert of(*climb[::-1])["word"] == "fell"


def test_ends_are_means_of_five_steps_or_of_half_of_a_short_run():
    told = of(*([0.0] * 5 + [9.0] * 10 + [1.0] * 5))
    assert (told["first"], told["last"], told["over_steps"]) == (0.0, 1.0, 5)
    assert of(0, 0, 0, 5, 1, 1, 1)["over_steps"] == 3


def test_a_difference_within_the_scatter_is_no_change():
    # means 0.5 and 0.56; standard error of their difference 0.11
    told = of(0.3, 0.7, 0.4, 0.6, 0.5, 0.36, 0.76, 0.46, 0.66, 0.56)
    assert told["word"] == "flat"
    assert told["last"] - told["first"] == pytest.approx(0.06)


def test_equal_rewards_are_flat_though_they_scatter_not_at_all():
    assert of(*[0.1] * 10)["word"] == "flat"
    assert of(*[0.0] * 10)["word"] == "flat"
    assert of(*[0.1 + 0.2] * 5, *[0.3] * 5)["word"] == "flat"


def test_five_steps_say_nothing_and_six_do():
    assert of(0, 0, 0, 1, 1) == {"word": "unknown", "first": None, "last": None, "over_steps": 2}
    assert of(0, 0, 0, 1, 1, 1)["word"] == "rose"


def test_steps_without_a_reward_or_with_one_that_is_no_number_do_not_count():
    metrics = {step: {"reward": float(step > 3)} for step in range(1, 7)}
    metrics |= {0: {"val-core/quiz/reward/greedy": 0.1}, 7: {"reward": float("nan")}}
    assert verdict(metrics) == {"word": "rose", "first": 0.0, "last": 1.0, "over_steps": 3}
