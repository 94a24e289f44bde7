"""Signs of trouble under rewards as noisy as real ones: groups of right and wrong responses to unlike prompts."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hwgrpo.config import Config
from hwgrpo.observe.warnings import Monitor

N = 8
SPREAD = 1.5
"""Standard deviation of the prompts' difficulty, in logits."""
SEEDS = range(8)
QUIET = {
    "kl": 0.01,
    "response_length/clip_ratio": 0.0,
    "actor/entropy": 0.3,
    "response_length/mean": 100.0,
    "actor/grad_norm": 0.5,
    "training/rollout_probs_diff_mean": 1e-6,
}


def line(start: float, end: float, steps: int) -> list[float]:
    return [float(mean) for mean in np.linspace(start, end, steps)]


def warned(
    means: Sequence[float], prompts: int, seed: int, others: Callable[[int], dict] = lambda step: {}
) -> list[tuple[int, str]]:
    """Return (step, name) of the warnings of a run whose responses are right with these mean probabilities."""
    draw, monitor = np.random.default_rng(seed), Monitor(Config())
    for step, mean in enumerate(means, start=1):
        center = math.log(mean / (1 - mean)) * math.sqrt(1 + math.pi * SPREAD**2 / 8)
        chances = 1 / (1 + np.exp(-(center + SPREAD * draw.standard_normal(prompts))))
        right = (draw.random((prompts, N)) < chances[:, None]).astype(float)
        rewards = {
            "reward": float(right.mean()),
            "critic/rewards/max": float(right.max()),
            "critic/rewards/min": float(right.min()),
            "frac_reward_zero_std": float((right.std(axis=1) == 0).mean()),
        }
        monitor.add(step, QUIET | rewards | others(step))
    return [(warning.step, warning.name) for warning in monitor.warnings]


LEARNS = {
    "fast, then slower": line(0.14, 0.35, 50) + line(0.35, 0.45, 100),
    "slowly": line(0.3, 0.5, 200),
    "within ten steps": line(0.3, 0.7, 10) + [0.7] * 190,
    "to a limit": [0.6 - 0.4 * math.exp(-step / 40) for step in range(200)],
    "a rare reward": line(0.02, 0.4, 200),
}


@pytest.mark.parametrize("prompts", [4, 16])
@pytest.mark.parametrize("name", LEARNS)
def test_no_sign_is_seen_in_a_run_that_learns(name: str, prompts: int):
    signs = [sign for seed in SEEDS for sign in warned(LEARNS[name], prompts, seed)]
    # a batch of four rare rewards may have no signal ten times in a row, which is worth saying
    assert {sign for _, sign in signs} <= ({"groups too hard"} if prompts == 4 else set())
    assert len(signs) <= 1


@pytest.mark.parametrize("means", [line(0.3, 0.6, 150), line(0.3, 0.7, 10) + [0.7] * 140])
def test_one_extreme_reward_does_not_make_what_a_run_learns_small(means: list[float]):
    outlier = [
        warned(means, 16, seed, lambda step: {"critic/rewards/min": -10.0} if step == 3 else {}) for seed in SEEDS
    ]
    assert outlier == [[]] * len(SEEDS)


FLAT = {"medium": [0.3] * 300, "rare": [0.05] * 300, "worse": line(0.4, 0.25, 300)}


@pytest.mark.parametrize("prompts", [4, 16])
@pytest.mark.parametrize("name", FLAT)
def test_a_run_that_does_not_learn_is_told_so_and_has_not_fallen(name: str, prompts: int):
    signs = [warned(FLAT[name], prompts, seed) for seed in SEEDS]
    assert sum(any(sign == "reward flat" for _, sign in each) for each in signs) >= len(SEEDS) - 1
    assert not any(sign == "reward falling" for each in signs for _, sign in each)


def test_the_noisier_the_reward_the_later_is_it_called_flat():
    first = [
        min(step for step, sign in warned([0.3] * 300, prompts, 0) if sign == "reward flat") for prompts in (4, 64)
    ]
    assert first[0] > 100 > first[1]


@pytest.mark.parametrize("prompts", [16, 64])
def test_a_fall_is_seen_under_noise(prompts: int):
    rise_and_fall = line(0.3, 0.7, 80) + line(0.7, 0.3, 80) + [0.3] * 20
    assert all("reward falling" in {b: a for a, b in warned(rise_and_fall, prompts, seed)} for seed in SEEDS)


def shrinking(key: str, end: float) -> Callable[[int], dict]:
    """Return the values of a metric that falls to a share of its own within 20 steps."""
    return lambda step: {key: QUIET[key] * max(end, 1 - step / 20)}


@pytest.mark.parametrize(
    ("sign", "others"),
    [
        ("entropy collapse", shrinking("actor/entropy", 0.05)),
        ("length collapse", shrinking("response_length/mean", 0.2)),
    ],
)
def test_a_metric_that_shrinks_is_a_sign_where_the_reward_does_not_rise_and_none_where_it_does(sign: str, others):
    for seed in SEEDS:
        assert sign not in [name for _, name in warned(line(0.2, 0.8, 150), 8, seed, others)]
        assert sign in [name for _, name in warned([0.4] * 150, 8, seed, others)]


def test_one_step_with_a_huge_kl_is_no_explosion():
    assert warned(line(0.2, 0.6, 60), 16, 0, lambda step: {"kl": 50.0 if step == 40 else 0.02}) == []


def test_the_first_gradients_of_a_rare_reward_are_no_spike():
    def gradient(step: int) -> dict:
        signal = step > 30
        return {"actor/grad_norm": 0.5 if signal else 0.01, "frac_reward_zero_std": 0.9 if signal else 1.0}

    signs = [name for _, name in warned([0.02] * 40, 16, 0, gradient)]
    assert "gradient spike" not in signs
