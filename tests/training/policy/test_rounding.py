"""The bounds that tests compare by: rounding is within them on any processor, mistakes are not."""

import pytest
import torch

from hwgrpo.training.policy.layouts import PACKED
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, tiny_qwen3
from tests.support.numbers.rounding import (
    assert_gradients_close,
    assert_metrics_close,
    assert_updates_close,
    assert_values_close,
    drift,
)

KEYS, WEIGHT = "k_proj.bias", "k_proj.weight"


def layer() -> dict[str, torch.Tensor]:
    """Return gradients of two projections; the key's bias has none but for rounding, as where nothing rotates it."""
    torch.manual_seed(0)
    return {
        KEYS: torch.randn(32) * 1e-9,
        WEIGHT: torch.randn(32, 32) * 1e-2,
        "v_proj.bias": torch.randn(32) * 1e-2,
        "v_proj.weight": torch.randn(32, 32) * 1e-2,
    }


def test_a_gradient_that_is_nothing_but_rounding_may_be_any_other_rounding():
    for other in (-layer()[KEYS], torch.zeros(32), layer()[KEYS] * 3):
        assert_gradients_close(layer() | {KEYS: other}, layer())


MISTAKES = {
    "a factor": lambda g: {WEIGHT: g[WEIGHT] * 1.001},
    "a factor of a bias": lambda g: {"v_proj.bias": g["v_proj.bias"] * 1.001},
    "a row left out": lambda g: {WEIGHT: g[WEIGHT] * (torch.arange(32) != 5)[:, None]},
    "an entry left out": lambda g: {"v_proj.bias": g["v_proj.bias"] * (torch.arange(32) != 5)},
    "a gradient left out": lambda g: {"v_proj.bias": torch.zeros(32)},
    "one where none is": lambda g: {KEYS: g["v_proj.bias"] * 1e-3},
    "not a number": lambda g: {KEYS: torch.full((32,), torch.nan)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_further_apart_than_rounding(mistake: str):
    wrong = layer() | MISTAKES[mistake](layer())
    with pytest.raises(AssertionError, match=r"proj.* apart, more than"):
        assert_gradients_close(wrong, layer())
    with pytest.raises(AssertionError, match=r"again\..* apart, more than"):
        assert_updates_close(*({f"again.{name}": each for name, each in of.items()} for of in (wrong, layer())))


def test_parameters_that_are_missing_or_of_another_shape_are_named():
    with pytest.raises(AssertionError, match=KEYS):
        assert_gradients_close({WEIGHT: layer()[WEIGHT]}, {name: layer()[name] for name in (KEYS, WEIGHT)})
    with pytest.raises(AssertionError, match=KEYS):
        assert_gradients_close(layer() | {KEYS: torch.zeros(1)}, layer())


def test_a_log_prob_near_zero_has_the_error_of_the_logits_it_is_made_of():
    expected = torch.tensor([-1e-6, -9.0])
    assert_values_close(expected + 1e-4, expected)
    with pytest.raises(AssertionError, match="apart"):
        assert_values_close(expected * 1.001, expected)
    with pytest.raises(AssertionError):
        assert_values_close(torch.tensor([torch.nan, -9.0]), expected)


def test_sums_over_tokens_are_compared_by_their_number():
    expected = {"sum.tokens": torch.tensor(60.0), "sum.kl": torch.tensor(1e-7), "loss": torch.tensor(0.1)}
    assert_updates_close(expected | {"sum.kl": torch.tensor(2e-7)}, expected)
    for wrong in ({"sum.kl": torch.tensor(0.01)}, {"loss": torch.tensor(0.1002)}, {"sum.tokens": torch.tensor(61.0)}):
        with pytest.raises(AssertionError, match="apart"):
            assert_updates_close(expected | wrong, expected)


def test_metrics_of_runs_are_compared_line_by_line_and_name_by_name():
    lines = [{"step": 1, "reward": 0.5, "rollout_corr/kl": 1e-9}, {"step": 2, "reward": 0.25, "rollout_corr/kl": 0.0}]
    assert_metrics_close([lines[0] | {"rollout_corr/kl": -1e-8}, lines[1]], lines, drift(2))
    for wrong in (lines[:1], [lines[0], lines[1] | {"reward": 0.2501}], [lines[0], lines[1] | {"more": 1.0}]):
        with pytest.raises((AssertionError, ValueError)):
            assert_metrics_close(wrong, lines, drift(2))
    assert_metrics_close([lines[0], lines[1] | {"rollout_corr/kl": 7.0}], lines, drift(2), without=("rollout_corr/",))


def test_a_sequence_that_weighs_a_little_more_shows_and_another_layout_does_not():
    model, batch = tiny_qwen3(), ragged_batch()
    update = updater(model, layout=PACKED)
    expected = reference_gradients(model, update.config, batch)[1]
    assert_gradients_close(gradients(update, batch)[1], expected)
    batch.advantages[3] *= 1.01
    with pytest.raises(AssertionError, match="apart"):
        assert_gradients_close(gradients(update, batch)[1], expected)
