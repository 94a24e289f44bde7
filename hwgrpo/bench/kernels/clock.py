"""Time work by device events, processor time or wall time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from hwgrpo_backends.device import Device

from hwgrpo.bench.times import Times, spread

T = TypeVar("T")
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

    On an accelerator, by events around the work. On one host thread, by processor time, since other load on the machine
    does not add to it; with several threads, which share the work, by wall time.

    Args:
        device: device of the work.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        host = device.backend.is_host
        self._events: Any = None if host else torch.get_device_module(device.torch_device)
        self.name: ClockName = "device" if not host else "processor" if torch.get_num_threads() == 1 else "wall"

    def samples(self) -> Samples:
        """Return an empty series of samples."""
        return Samples(self.name)

    def measure(self, samples: Samples, work: Callable[[], T]) -> T:
        """Time the work, add the sample, and return its result."""
        with samples.times.measure(self._device.synchronize):
            if self._events is None:
                return work()
            began, ended = (self._events.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = work()
            ended.record()
            ended.synchronize()
            samples.device_s.append(began.elapsed_time(ended) / 1e3)  # milliseconds
        return result


def median_ratio(base: Samples, other: Samples) -> float | None:
    """Return the speed-up of `other`: the median over rounds of base's seconds over its own."""
    pairs = [a / b for a, b in zip(base.seconds, other.seconds) if b > 0]
    return median(pairs) if pairs else None
