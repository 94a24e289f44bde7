"""How far two updates are apart, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from hwgrpo.bench.layout_comparison import FirstUpdate, compare, fault, tolerance
from hwgrpo.bench.step_result import LayoutDifference
from hwgrpo.bench.work import Tokens


def update(loss: float, tokens: int = 5, **gradient: list[float]) -> FirstUpdate:
    return FirstUpdate(loss, {name: torch.tensor(values) for name, values in gradient.items()}, Tokens(9, tokens))


def test_gradients_are_compared_as_one_vector_over_all_parameters():
    apart = compare(update(2.0, a=[3.0, 0.0], b=[4.0]), update(2.5, a=[0.0, 3.0], b=[4.4]))
    assert apart.loss == pytest.approx(0.25)
    assert apart.gradient == pytest.approx((9 + 9 + 0.16) ** 0.5 / 5)
    assert apart.gradient_norm == pytest.approx(((9 + 4.4**2) ** 0.5 - 5) / 5)


def test_small_losses_are_compared_as_they_are():
    assert compare(update(1e-6, a=[1.0]), update(2e-6, a=[1.0])).loss == pytest.approx(1e-6)


def test_a_parameter_that_only_one_side_trains_counts_whole():
    both, one = update(0.0, a=[3.0], b=[4.0]), update(0.0, a=[3.0])
    assert compare(both, one).gradient == pytest.approx(0.8)
    assert compare(one, both).gradient == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (LayoutDifference(1e-4, 0.0, 0.0), "its loss differs by 1.0e-04"),
        (LayoutDifference(0.0, 1e-4, 0.0), "its gradient norm differs by 1.0e-04"),
        (LayoutDifference(0.0, 0.0, 1e-3), "its gradient differs by 1.0e-03"),
        (LayoutDifference(float("nan"), 0.0, 0.0), "its loss differs by nan"),
    ],
)
def test_each_difference_beyond_rounding_is_a_fault(apart: LayoutDifference, words: str):
    same = update(0.0, a=[1.0])
    assert words in fault(apart, tolerance(torch.float32), same, same)


def test_rounding_is_no_fault_and_bf16_rounds_more():
    same = update(0.0, a=[1.0])
    assert fault(LayoutDifference(1e-6, 1e-6, 1e-6), tolerance(torch.float32), same, same) == ""
    of_bf16 = LayoutDifference(1e-3, 1e-3, 1e-2)
    assert fault(of_bf16, tolerance(torch.float32), same, same)
    assert fault(of_bf16, tolerance(torch.bfloat16), same, same) == ""


def test_tokens_left_out_are_a_fault_however_small_the_difference():
    assert "it trains 4 response tokens of 5" in fault(
        LayoutDifference(0.0, 0.0, 0.0), tolerance(torch.bfloat16), update(0.0, 5), update(0.0, 4)
    )
