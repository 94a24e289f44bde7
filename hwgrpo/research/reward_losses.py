"""Losses of a reward model's scores, each [B] scores -> [B] losses, for the caller to average."""

from __future__ import annotations

import torch
from torch.nn import functional


def mse(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared differences, [B].

    Args:
        scores: [B] logits.
        targets: [B] numbers.
    """
    return (scores - targets).square()


def classification(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropies of the probabilities sigmoid(score), [B].

    Args:
        scores: [B] logits.
        targets: [B] probabilities, from 0 (wrong) to 1 (correct).
    """
    return functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None) -> torch.Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of each pair, [B].

    Source: Bradley and Terry 1952; with scores of a model, Ouyang et al. 2022 (InstructGPT); the margin, Touvron et al.
    2023 (Llama 2), equation 2.

    Args:
        chosen: [B] logits of the better responses.
        rejected: [B] logits of the worse ones.
        margin: [B] distances that the scores should have; None: 0.
    """
    difference = chosen - rejected
    return -functional.logsigmoid(difference if margin is None else difference - margin)
