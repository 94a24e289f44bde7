"""How well scores of a reward model agree with outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hwgrpo.research.score_ranking import rank_outcomes


def ranking_accuracy(scores: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Return the share of pairs of different outcomes whose scores have the same order; equal scores count half.

    With two outcomes this is the area under the ROC curve.

    Args:
        scores: of the model, [N].
        outcomes: of the rule, [N].

    Returns:
        The share; None if all outcomes are equal.
    """
    ranking = rank_outcomes(*(torch.tensor(list(each), dtype=torch.float64) for each in (scores, outcomes)))
    return ranking.right / ranking.pairs if ranking.pairs else None


def calibration_error(probabilities: Sequence[float], outcomes: Sequence[float], bins: int = 10) -> float:
    """Return the expected calibration error: |mean probability - mean outcome| of equal bins, weighted by their sizes.

    Source: Guo et al. 2017.

    Args:
        probabilities: of the model, in [0, 1], [N] with N > 0.
        outcomes: of the rule, in [0, 1], [N].
        bins: number of bins.
    """
    gaps = [0.0] * bins
    for probability, outcome in zip(probabilities, outcomes, strict=True):
        gaps[min(int(probability * bins), bins - 1)] += probability - outcome
    return sum(map(abs, gaps)) / len(probabilities)
