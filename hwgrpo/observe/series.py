"""The metrics of a run so far, as series that detectors of trouble look back on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwgrpo.observe.shown_fields import Field


@dataclass(frozen=True)
class Window:
    """Consecutive values of one metric."""

    values: Sequence[float]
    first_step: int
    last_step: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if self.first_step == self.last_step:
            return f"step {self.first_step}"
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(frozen=True)
class Trend:
    """Least-squares line through consecutive values."""

    rise: float
    """Change of the line from the first value to the last."""
    error: float
    """Standard error of the rise, from the noise of single values."""


class Series:
    """The finite values of one metric with their steps, oldest first."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._squared_changes = 0.0
        self._best: dict[int, tuple[float, int]] = {}
        self.lowest = math.inf
        """Of all values."""
        self.highest = -math.inf
        """Of all values."""

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        """Append the value of a later step."""
        if self.values:
            self._squared_changes += (value - self.values[-1]) ** 2
        self.steps.append(step)
        self.values.append(value)
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        for size, (best, _) in self._best.items():
            mean = statistics.fmean(self.values[-size:])
            if mean > best:
                self._best[size] = (mean, len(self) - size)

    def first(self, count: int) -> Window:
        """Return the first `count` values; there must be that many."""
        return self._window(0, count)

    def last(self, count: int, skip: int = 0) -> Window:
        """Return the `count` values before the last `skip`; there must be that many."""
        return self._window(len(self) - skip - count, len(self) - skip)

    def best(self, count: int) -> Window:
        """Return the `count` consecutive values with the greatest mean; there must be that many."""
        if count not in self._best:
            means = [statistics.fmean(self.values[i : i + count]) for i in range(len(self) - count + 1)]
            start = max(range(len(means)), key=means.__getitem__)
            self._best[count] = (means[start], start)
        start = self._best[count][1]
        return self._window(start, start + count)

    @property
    def noise(self) -> float:
        """Standard deviation of a value about its trend, from the differences of neighbours.

        A slow rise or fall hardly enters it. Source: von Neumann et al. 1941, The Mean Square Successive Difference.
        """
        return math.sqrt(self._squared_changes / (2 * (len(self) - 1))) if len(self) > 1 else 0.0

    def trend(self, count: int) -> Trend:
        """Return the line through the last `count` values; there must be that many."""
        values = np.array(self.last(count).values)
        places = np.arange(count) - (count - 1) / 2
        rise = float(places @ values) / max(float(places @ places), 1.0) * (count - 1)
        return Trend(rise, self.noise * math.sqrt(12 / count))

    def steps_up(self, least: float, errors: float) -> bool:
        """Return whether the mean of the values from some step on is clearly above that of the values before it.

        A run that learned early has such a step, even where its trend is long flat. Source: Page 1955, A Test for a
        Change in a Parameter Occurring at an Unknown Point.

        Args:
            least: smallest rise that counts.
            errors: standard errors by which it must exceed noise.
        """
        sums, before = np.cumsum(self.values), np.arange(1, len(self))
        after = len(self) - before
        rises = (sums[-1] - sums[:-1]) / after - sums[:-1] / before
        clear = rises > np.maximum(least, errors * self.noise * np.sqrt(1 / before + 1 / after))
        return bool(np.any(clear))

    def _window(self, start: int, end: int) -> Window:
        assert 0 <= start < end <= len(self), "the caller must ask for existing values"
        return Window(self.values[start:end], self.steps[start], self.steps[end - 1])


class MetricSeries:
    """Series of the metrics that are watched.

    Args:
        fields: what to keep.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._series = {field: Series() for field in fields}
        self.step = 0
        """The newest step."""

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the metrics of a later step; missing or non-finite values leave a gap."""
        self.step = step
        for field, series in self._series.items():
            value = field.read(values)
            if value is not None and math.isfinite(value):
                series.add(step, value)

    def __getitem__(self, field: Field) -> Series:
        return self._series[field]
