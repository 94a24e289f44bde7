"""Coefficients of KL and entropy that follow a target."""

import math

import pytest

from hwgrpo.algorithms.coefficients import adapt_entropy, adapt_kl, initial_coefficients
from hwgrpo.config import load_config
from hwgrpo.config.schema import AlgorithmConfig, KlConfig
from hwgrpo.errors import ConfigError


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.15, 0.00102048), (0.11, 0.00101024), (0.1, 0.001), (0.09, 0.00098976), (0.0, 0.00097952), (-1.0, 0.00097952)],
)
def test_the_kl_coefficient_follows_the_relative_error_up_to_a_fifth(kl: float, expected: float):
    config = KlConfig(coef=0.001, target=0.1, horizon=10000)
    assert adapt_kl(0.001, kl, 1024, config) == pytest.approx(expected, rel=1e-12)


def test_a_horizon_at_which_a_step_would_turn_the_coefficient_around_is_refused():
    def load(horizon: int):
        sizes = ("trainer.prompts_per_step=8", "rollout.n=5")
        return load_config(
            "tiny_sort",
            ["algorithm.kl.coef=0.1", "algorithm.kl.target=0.05", f"algorithm.kl.horizon={horizon}", *sizes],
        )

    with pytest.raises(ConfigError, match=r"horizon=4 with 40 responses per step .* by -1; use at least 9, e.g. 400"):
        load(4)
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef by 0; use at least 9"):
        load(8)
    assert adapt_kl(0.1, 0.0, 40, load(9).algorithm.kl) == pytest.approx(0.1 / 9)


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


ADAPTIVE = AlgorithmConfig(
    entropy_coef=0.02, entropy_target=0.3, entropy_coef_delta=0.01, entropy_coef_min=0.005, entropy_coef_max=0.035
)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [(0.02, 0.2, 0.03), (0.02, 0.3, 0.03), (0.02, 0.31, 0.01), (0.03, 0.1, 0.035), (0.01, 0.9, 0.005)],
)
def test_the_entropy_coefficient_steps_towards_the_target_within_its_bounds(coef, entropy, expected):
    assert adapt_entropy(coef, entropy, ADAPTIVE) == pytest.approx(expected)
    assert adapt_entropy(coef, math.nan, ADAPTIVE) == coef
    assert adapt_entropy(coef, entropy, AlgorithmConfig(entropy_coef=0.02)) == coef


def test_the_bonus_is_off_above_the_target_and_before_an_entropy_is_known():
    coefficients = initial_coefficients(ADAPTIVE)
    assert coefficients.entropy_bonus == 0
    coefficients.after_update(0.25)
    assert coefficients.entropy_bonus == pytest.approx(0.03)
    resumed = initial_coefficients(ADAPTIVE)
    resumed.restore(coefficients.state())
    assert resumed == coefficients
    coefficients.after_update(math.nan)
    assert coefficients.entropy_bonus == pytest.approx(0.03), "an update without an entropy changes nothing"
    coefficients.after_update(0.5)
    assert (coefficients.entropy_bonus, coefficients.entropy) == (0, pytest.approx(0.02))
    assert initial_coefficients(AlgorithmConfig(entropy_coef=0.02)).entropy_bonus == 0.02


def test_a_first_coefficient_outside_of_its_bounds_is_refused():
    with pytest.raises(ConfigError, match=r"entropy_coef=2 is not between entropy_coef_min=0 and entropy_coef_max=1"):
        load_config("tiny_sort", ["algorithm.entropy_target=0.3", "algorithm.entropy_coef=2"])
