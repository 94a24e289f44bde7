"""Seconds of the rounds of a measurement, on the clock and on the processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeVar

T = TypeVar("T")
CLOCKS = (time.perf_counter, time.process_time)


@dataclass
class Times:
    """One sample per round. `median`, `minimum` and `spread` are None before the first."""

    wall_s: list[float] = field(default_factory=list)
    """Seconds on the clock."""
    cpu_s: list[float] = field(default_factory=list)
    """Seconds of processor time, of all threads of this process; other work on the machine does not count."""

    @contextmanager
    def measure(
        self, synchronize: Callable[[], None], *, clocks: Sequence[Callable[[], float]] = CLOCKS
    ) -> Iterator[None]:
        """Add the time that the block takes.

        Args:
            synchronize: called at both ends, so that work queued on a device counts for the block that queued it.
            clocks: of wall time and of processor time.
        """
        synchronize()
        began = [clock() for clock in clocks]
        yield
        synchronize()
        for samples, clock, start in zip((self.wall_s, self.cpu_s), clocks, began, strict=True):
            samples.append(clock() - start)

    @property
    def median(self) -> float | None:
        """Median of the wall seconds."""
        return median(self.wall_s) if self.wall_s else None

    @property
    def minimum(self) -> float | None:
        """Least of the wall seconds."""
        return min(self.wall_s, default=None)

    @property
    def spread(self) -> float | None:
        """Width of the middle half of the wall seconds (interquartile range); None for one sample."""
        return spread(self.wall_s)

    def to_json(self) -> dict[str, Any]:
        """Return samples and statistics."""
        return {
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "median_s": self.median,
            "min_s": self.minimum,
            "spread_s": self.spread,
        }


def spread(samples: Sequence[float]) -> float | None:
    """Return the width of the middle half of samples (interquartile range); None for fewer than two."""
    if len(samples) < 2:
        return None
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return third - first


def turns(items: Sequence[T], number: int) -> list[T]:
    """Return the items in the order of a round: each round begins one item later than the round before."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def total(parts: Sequence[Times]) -> Times:
    """Return the sums, round by round, of parts that have the same rounds."""
    wall = [sum(seconds, 0.0) for seconds in zip(*(part.wall_s for part in parts), strict=True)]
    cpu = [sum(seconds, 0.0) for seconds in zip(*(part.cpu_s for part in parts), strict=True)]
    return Times(wall, cpu)
