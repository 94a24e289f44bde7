"""How well scores order responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 1024
"""Rows of the table of pairs that are compared at once."""


@dataclass(frozen=True)
class Ranking:
    """How well scores order pairs of a better and a worse response."""

    pairs: int
    right: float
    """Pairs whose better response has the higher score; equal scores count half."""
    difference: float
    """Sum of the scores of better responses minus those of worse ones."""

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return `<prefix>/accuracy` and `<prefix>/margin`, means over the pairs; empty without a pair."""
        if not self.pairs:
            return {}
        return {f"{prefix}/accuracy": self.right / self.pairs, f"{prefix}/margin": self.difference / self.pairs}


def rank_pairs(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> Ranking:
    """Compare the scores of chosen responses with those of rejected ones, [B] each."""
    difference = chosen_B.double() - rejected_B.double()
    right = float((difference > 0).sum()) + 0.5 * float((difference == 0).sum())
    return Ranking(len(difference), right, math.fsum(difference.tolist()))


def rank_outcomes(scores_N: torch.Tensor, targets_N: torch.Tensor) -> Ranking:
    """Compare the scores of all pairs of responses with different targets, [N] each.

    With targets of 0 and 1 the accuracy is the area under the ROC curve, and the margin the mean score of correct
    responses minus that of wrong ones.
    """
    scores_N, pairs, right, difference = scores_N.double(), 0, 0.0, 0.0
    for scores, targets in zip(scores_N.split(BLOCK), targets_N.split(BLOCK), strict=True):
        better = targets[:, None] > targets_N
        apart = (scores[:, None] - scores_N)[better]
        pairs += len(apart)
        right += float((apart > 0).sum()) + 0.5 * float((apart == 0).sum())
        difference += float(apart.sum())
    return Ranking(pairs, right, difference)
