"""Whether the reward of a run changed, in words, measured against its own scatter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from hwgrpo.observe.fields import REWARD
from hwgrpo.observe.history import ENDS

FEWEST = 3
"""Steps that each end of a run needs before their means are compared."""
THRESHOLD = 2.5
"""Standard errors by which the two means must differ to be called a change."""


def verdict(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Compare the mean reward of the first and the last steps.

    Args:
        metrics: step -> metrics.

    Returns:
        `{word, first, last, over_steps}`: word is `rose`, `fell`, `flat` (the means differ by less than 2.5 standard
        errors of the steps' scatter) or `unknown` (fewer than 6 steps with a reward; first and last are then null).
    """
    rewards = [
        r for _, values in sorted(metrics.items()) if (r := REWARD.read(values)) is not None and math.isfinite(r)
    ]
    count = min(ENDS, len(rewards) // 2)
    if count < FEWEST:
        return {"word": "unknown", "first": None, "last": None, "over_steps": count}
    first, last = rewards[:count], rewards[-count:]
    change = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / count)
    # Sums in floating point leave equal rewards a last bit apart.
    noise = max(THRESHOLD * error, 1e-9 * max(map(abs, rewards)))
    word = "flat" if abs(change) <= noise else "rose" if change > 0 else "fell"
    return {"word": word, "first": statistics.fmean(first), "last": statistics.fmean(last), "over_steps": count}
