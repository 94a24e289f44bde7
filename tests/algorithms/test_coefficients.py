"""Coefficients of KL and entropy that follow a target."""

import math

import pytest

from hwgrpo.algorithms.coefficients import adapt_kl, initial_coefficients
from hwgrpo.config.schema import AlgorithmConfig, KlConfig


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.15, 0.00102048), (0.11, 0.00101024), (0.1, 0.001), (0.09, 0.00098976), (0.0, 0.00097952), (-1.0, 0.00097952)],
)
def test_the_kl_coefficient_follows_the_relative_error_up_to_a_fifth(kl: float, expected: float):
    config = KlConfig(coef=0.001, target=0.1, horizon=10000)
    assert adapt_kl(0.001, kl, 1024, config) == pytest.approx(expected, rel=1e-12)


def test_without_a_target_or_a_finite_kl_the_coefficient_stays():
    assert adapt_kl(0.001, 5.0, 1024, KlConfig(coef=0.001)) == 0.001
    assert adapt_kl(0.001, math.nan, 1024, KlConfig(coef=0.001, target=0.1)) == 0.001


def test_the_loss_has_the_kl_only_where_the_reward_has_not():
    for in_reward, expected in ((False, 0.2), (True, 0.0)):
        coefficients = initial_coefficients(AlgorithmConfig(kl=KlConfig(coef=0.2, in_reward=in_reward)))
        assert (coefficients.kl, coefficients.kl_loss) == (0.2, expected)


def test_a_resumed_run_continues_with_adapted_coefficients_and_takes_fixed_ones_from_its_settings():
    adapted = AlgorithmConfig(kl=KlConfig(coef=0.1, target=0.01, horizon=10))
    before, after = initial_coefficients(adapted), initial_coefficients(adapted)
    assert before.after_step({"actor/kl_loss": 1.0}, 5) == {"actor/kl_coef": 0.1}
    after.restore(before.state())
    assert after.kl == before.kl == pytest.approx(0.11)
    fixed = initial_coefficients(AlgorithmConfig(kl=KlConfig(coef=0.3)))
    fixed.restore(before.state())
    assert fixed.kl == 0.3
    assert fixed.state() == {}
