"""The losses of a reward model, by their definitions in fp64, and where a naive formula overflows."""

import math

import pytest
import torch

from hwgrpo.catalog import REWARD_MODEL_LOSSES
from hwgrpo.research import reward_losses

SCORES = torch.tensor([-2.0, -0.3, 0.0, 0.7, 3.1], dtype=torch.float64)
EXACT = 1e-12
"""A few roundings of fp64 of values near 1."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_mse_is_the_squared_difference_of_each_row():
    targets = torch.tensor([1.0, -0.5, 0.25, 2.0, 3.1], dtype=torch.float64)
    expected = [(s - t) ** 2 for s, t in zip(SCORES.tolist(), targets.tolist(), strict=True)]
    assert reward_losses.mse(SCORES, targets).tolist() == pytest.approx(expected, abs=EXACT)


def test_classification_is_the_cross_entropy_with_a_label_from_0_to_1():
    labels = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.0], dtype=torch.float64)
    expected = [
        -label * math.log(sigmoid(s)) - (1 - label) * math.log(1 - sigmoid(s))
        for s, label in zip(SCORES.tolist(), labels.tolist(), strict=True)
    ]
    assert reward_losses.classification(SCORES, labels).tolist() == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("margin", [None, 0.8])
def test_bradley_terry_is_the_log_probability_of_the_choice(margin):
    chosen, rejected = SCORES, SCORES.flip(0)
    margins = None if margin is None else torch.full_like(chosen, margin)
    expected = [
        -math.log(sigmoid(c - r - (margin or 0.0))) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert reward_losses.bradley_terry(chosen, rejected, margins).tolist() == pytest.approx(expected, abs=EXACT)


def test_large_scores_neither_overflow_nor_lose_their_gradient():
    scores = torch.tensor([-1e4, 1e4], requires_grad=True)
    wrong = torch.tensor([1.0, 0.0])
    for losses in (reward_losses.classification(scores, wrong), reward_losses.bradley_terry(scores, scores.flip(0))):
        assert losses.isfinite().all()
    reward_losses.classification(scores, wrong).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [-1.0, 1.0]


def test_every_loss_of_the_setting_exists():
    assert all(callable(getattr(reward_losses, name)) for name in REWARD_MODEL_LOSSES)
