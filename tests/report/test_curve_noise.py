"""Two curves part where their gap exceeds the noise of each; curves that differ by chance do not."""

import math

import numpy as np
import pytest

from hwgrpo.report.curve_noise import FALSE_ALARMS, CurveNoise, compare_curves, estimate_noise, t_quantile

STEPS = 30


@pytest.mark.parametrize(
    ("tail", "freedom", "expected"),
    # Fisher and Yates 1963, table III; the normal distribution; Cauchy: tan(pi (1/2 - tail)); v = 2: closed form
    [
        (0.025, 10, 2.2281),
        (0.0005, 5, 6.8688),
        (1e-5, math.inf, 4.26489),
        (1e-6, 1, math.tan(math.pi * (0.5 - 1e-6))),
        (1e-7, 2, (1 - 2e-7) / math.sqrt(2 * 1e-7 * (1 - 1e-7))),
    ],
)
def test_the_quantile_of_students_t(tail: float, freedom: float, expected: float):
    assert t_quantile(tail, freedom) == pytest.approx(expected, rel=1e-4)


def curve(rng: np.random.Generator, drift: float, slope: float = 0.0) -> np.ndarray:
    """Return noise of variance 1 about a level that drifts."""
    level = np.concatenate([[0.0], np.cumsum(math.sqrt(drift) * rng.standard_normal(STEPS - 1))])
    return level + slope * np.arange(STEPS) + rng.standard_normal(STEPS)


def parts(a: np.ndarray, b: np.ndarray, start: int = 0) -> int | None:
    return compare_curves(b - a, estimate_noise(a), estimate_noise(b), start=start, elapsed=0, tests=1).index


@pytest.mark.parametrize("drift", [0.0, 0.01, 0.1, 10.0])
def test_curves_of_one_distribution_part_no_more_often_than_by_chance(drift: float):
    rng, pairs = np.random.default_rng(0), 60
    alarms = sum(parts(curve(rng, drift, 0.3), curve(rng, drift, 0.3)) is not None for _ in range(pairs))
    # the binomial's upper end: 4 of 60 alarms at a rate of 1 % have a probability of 0.3 %
    assert alarms <= 3
    assert FALSE_ALARMS == 0.01


def test_a_lasting_gap_parts_the_curves_where_it_begins():
    rng = np.random.default_rng(1)
    a, b = curve(rng, 0.0), curve(rng, 0.0)
    b[10:] += 20
    assert parts(a, b, start=3) == 10


def test_a_small_gap_is_seen_in_the_mean_of_many_steps_only():
    noise = CurveNoise(1.0, 0.0, STEPS - 2)
    for steps, index in ((STEPS, 0), (4, None)):
        result = compare_curves(np.full(steps, 2.0), noise, noise, start=0, elapsed=0, tests=1)
        assert result.index == index
    # the same gap may come about by drift
    drifting = CurveNoise(1.0, 1.0, STEPS - 2)
    assert compare_curves(np.full(STEPS, 2.0), drifting, drifting, start=0, elapsed=0, tests=1).index is None


def test_drift_counts_from_the_step_at_which_runs_part():
    drifting = CurveNoise(1.0, 1.0, STEPS - 2)
    gaps = np.full(STEPS, 6.0)
    assert compare_curves(gaps, drifting, drifting, start=5, elapsed=0, tests=1).index == 5
    assert compare_curves(gaps, drifting, drifting, start=5, elapsed=9, tests=1).index is None


def test_the_drift_of_a_run_that_jumps_is_not_that_of_the_other():
    steady, jumping = CurveNoise(1.0, 0.0, STEPS - 2), CurveNoise(1.0, 100.0, STEPS - 2)
    gaps = np.full(STEPS, 10.0)
    assert compare_curves(gaps, steady, jumping, start=0, elapsed=5, tests=1).index == 0


def test_one_outlier_does_not_part_curves_but_two_in_a_row_do():
    a = CurveNoise(1.0, 0.0, 28)
    gaps = np.zeros(STEPS)
    gaps[12] = 1e6
    assert compare_curves(gaps, a, a, start=0, elapsed=0, tests=1).index is None
    gaps[13] = 1e6
    assert compare_curves(gaps, a, a, start=0, elapsed=0, tests=1).index == 12


def test_curves_without_noise_part_at_the_first_difference():
    a = estimate_noise([5.0] * 6)
    assert compare_curves([0, 0, 0, 1e-9, 0, 0], a, a, start=2, elapsed=0, tests=9).index == 3


def test_the_smallest_gap_that_counts_does():
    rng = np.random.default_rng(3)
    noise = estimate_noise(curve(rng, 0.0))
    smallest = compare_curves(np.ones(STEPS), noise, noise, start=0, elapsed=0, tests=1).smallest
    for factor, counts in ((1.01, True), (0.99, False)):
        gaps = np.full(STEPS, factor * smallest)
        assert (compare_curves(gaps, noise, noise, start=0, elapsed=0, tests=1).index is not None) == counts
