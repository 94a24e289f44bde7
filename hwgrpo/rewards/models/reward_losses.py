"""Losses of reward models: pure functions of their scores."""

from __future__ import annotations

import torch
from torch.nn import functional


def mse(scores_B: torch.Tensor, targets_B: torch.Tensor) -> torch.Tensor:
    """Return the squared errors, [B]."""
    return (scores_B - targets_B) ** 2


def classification(scores_B: torch.Tensor, targets_B: torch.Tensor) -> torch.Tensor:
    """Return the cross entropies of the probabilities sigmoid(score) with targets in [0, 1], [B]."""
    return functional.binary_cross_entropy_with_logits(scores_B, targets_B, reduction="none")


def bradley_terry(
    chosen_B: torch.Tensor, rejected_B: torch.Tensor, margin_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of each pair, [B].

    Source: Bradley and Terry 1952; the margin is that of Llama 2 (Touvron et al. 2023).
    """
    gaps_B = chosen_B - rejected_B
    return -functional.logsigmoid(gaps_B if margin_B is None else gaps_B - margin_B)
