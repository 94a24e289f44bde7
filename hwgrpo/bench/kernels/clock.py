"""How long work takes: on a device's own events, or on the processor, or on the wall."""

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
        clock: which of the three below counts.
        times: wall and processor seconds.
        device_s: seconds between two events on the device.
    """

    clock: ClockName
    times: Times = field(default_factory=Times)
    device_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The samples that count."""
        return {"device": self.device_s, "processor": self.times.cpu_s, "wall": self.times.wall_s}[self.clock]

    @property
    def median(self) -> float | None:
        """Median of the seconds that count; None before the first."""
        return median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return all samples, and statistics of those that count."""
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

    An accelerator is asked for events around the work. On one thread of a processor the time that counts is the
    process's own, since other work on the machine does not add to it; several threads share work, so there the wall
    clock counts.

    Args:
        device: what the work runs on.
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
        """Add the time that the work takes, and return its result."""
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
    """Return how many times as fast `other` is: the median over rounds of base's seconds over its own."""
    pairs = [a / b for a, b in zip(base.seconds, other.seconds) if b > 0]
    return median(pairs) if pairs else None
