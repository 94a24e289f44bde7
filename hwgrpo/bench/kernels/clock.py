"""Time work by device events, processor time or wall time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from hwgrpo_backends.device import Device

from hwgrpo.bench.times import Times, spread

T = TypeVar("T")
BUSY_SIZE = 2048
"""Rows and columns of the matrices whose products keep a device busy."""
LONGEST_BUSY = 0.05
"""Seconds of them at the most; work that takes the host longer to launch waits for it on any device."""
ClockName = Literal["device", "processor", "wall"]


@dataclass
class Samples:
    """One sample per round.

    Args:
        clock: the reported time of the three.
        times: wall and processor seconds.
        device_s: seconds between two events on the device.
    """

    clock: ClockName
    times: Times = field(default_factory=Times)
    device_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The samples of the reported clock."""
        return {"device": self.device_s, "processor": self.times.cpu_s, "wall": self.times.wall_s}[self.clock]

    @property
    def median(self) -> float | None:
        """Median of `seconds`; None without samples."""
        return median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return all samples, and statistics of `seconds`."""
        return {
            "wall_s": self.times.wall_s,
            "cpu_s": self.times.cpu_s,
            "device_s": self.device_s,
            "median_s": self.median,
            "min_s": min(self.seconds, default=None),
            "spread_s": spread(self.seconds),
        }


class Clock:
    """Measures on one device.

    On an accelerator, by events around the work, which is launched while the device is busy: the time that the host
    takes to launch it, which a training step hides, does not count. On one host thread, by processor time, since other
    load on the machine does not add to it; with several threads, which share the work, by wall time.

    Args:
        device: device of the work.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        host = device.backend.is_host
        self._events: Any = None if host else torch.get_device_module(device.torch_device)
        self._busy: Callable[[float], None] | None = None if host else BusyDevice(device, self._events)
        self.name: ClockName = "device" if not host else "processor" if torch.get_num_threads() == 1 else "wall"

    def samples(self) -> Samples:
        """Return an empty series of samples."""
        return Samples(self.name)

    def measure(self, samples: Samples, work: Callable[[], T]) -> T:
        """Time the work, add the sample, and return its result; on an accelerator it runs twice, once by each clock."""
        with samples.times.measure(self._device.synchronize):
            began = time.perf_counter()
            result = work()
            launched = time.perf_counter() - began
        if self._busy is None:
            return result
        del result
        self._busy(launched)
        start, end = (self._events.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work()
        end.record()
        end.synchronize()
        samples.device_s.append(start.elapsed_time(end) / 1e3)  # milliseconds
        return result


class BusyDevice:
    """Queues products of matrices on a device for about a number of seconds.

    Args:
        device: the device.
        events: torch's module with the device's `Event`.
    """

    def __init__(self, device: Device, events: Any) -> None:
        self._device = device.torch_device
        self._events = events
        self._matrix: torch.Tensor | None = None
        self._seconds = 0.0

    def __call__(self, seconds: float) -> None:
        """Keep the device busy for at least `seconds`, but no longer than about `LONGEST_BUSY`."""
        if self._matrix is None:
            self._matrix = torch.zeros(BUSY_SIZE, BUSY_SIZE, device=self._device)
            self._multiply(2)  # the first ones load libraries
            start, end = (self._events.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._multiply(8)
            end.record()
            end.synchronize()
            self._seconds = max(start.elapsed_time(end) / 8e3, 1e-6)
        self._multiply(math.ceil(min(1.25 * seconds, LONGEST_BUSY) / self._seconds))

    def _multiply(self, number: int) -> None:
        assert self._matrix is not None
        for _ in range(number):
            torch.mm(self._matrix, self._matrix)


def median_ratio(base: Samples, other: Samples) -> float | None:
    """Return the speed-up of `other`: the median over rounds of base's seconds over its own."""
    pairs = [a / b for a, b in zip(base.seconds, other.seconds) if b > 0]
    return median(pairs) if pairs else None
