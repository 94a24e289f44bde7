"""torch's number of threads, set by the cores that other programs leave free (`trainer.threads=free`)."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

STAT = Path("/proc/stat")
"""Linux: ticks of every core by what it did since the host has started."""
BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of a core's line in which it was not free: user, nice, system, irq, softirq, steal."""
SHORTEST = 0.2
"""Seconds that a load is measured over at least: a tick is 0.01."""


@dataclass(frozen=True)
class CpuTimes:
    """CPU times up to one moment."""

    clock: float
    """Seconds of a monotonic clock."""
    own: float
    """CPU seconds of this process; its child processes are other programs, which need cores of their own."""
    busy: Mapping[int, float]
    """Core -> seconds in which it was not free."""


@dataclass(frozen=True)
class Load:
    """The load of other programs on this process's cores."""

    cores: int
    others: float
    """Cores that other programs used on average."""


def parse_busy(text: str, cores: Collection[int], ticks_per_second: float) -> dict[int, float]:
    """Return the seconds in which cores were not free, by core.

    Args:
        text: content of /proc/stat.
        cores: the cores that this process may run on; the others are left out.
        ticks_per_second: unit of the text.
    """
    busy = {}
    for line in text.splitlines():
        name, *fields = line.split()
        core = name.removeprefix("cpu")
        # a sandbox may have lines without any ticks
        if core != name and core.isdecimal() and int(core) in cores and any(map(int, fields)):
            busy[int(core)] = sum(int(fields[i]) for i in BUSY if i < len(fields)) / ticks_per_second
    return busy


def read_cpu_times() -> CpuTimes | None:
    """Read the CPU times of this host and process; None where the system does not have them."""
    try:
        busy = parse_busy(STAT.read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):  # AttributeError: macOS has no affinity
        return None
    return CpuTimes(time.monotonic(), time.process_time(), busy) if busy else None


def load_between(before: CpuTimes, now: CpuTimes) -> Load | None:
    """Return the load between two moments.

    Returns:
        None if they are too close, or a counter went backwards; cores that came or went are left out.
    """
    seconds = now.clock - before.clock
    spent = [now.busy[core] - before.busy[core] for core in now.busy.keys() & before.busy.keys()]
    if seconds < SHORTEST or not spent or min(spent) < 0:
        return None
    return Load(len(spent), max(0.0, sum(spent) - (now.own - before.own)) / seconds)


class FreeCoreThreads:
    """Sets torch's threads to the number of cores that other programs leave free, at least 1.

    torch keeps the number by thread: call it in the thread that computes. The first load is measured from here on.
    """

    def __init__(self) -> None:
        self.most = torch.get_num_threads()
        """torch's number of threads before: its default, which `OMP_NUM_THREADS` may limit."""
        self.threads = self.most
        self._last = read_cpu_times()
        self._noted = False

    def update(self) -> str | None:
        """Set the threads by the load since the last call; return a note if their number changes.

        Calls less than 0.2 s apart change nothing.
        """
        now = read_cpu_times()
        if now is None or self._last is None:
            return self._without_load(now)
        load = load_between(self._last, now)
        if now.clock - self._last.clock >= SHORTEST:
            self._last = now
        if load is None:
            return None
        before, self.threads = self.threads, max(1, min(self.most, round(load.cores - load.others)))
        torch.set_num_threads(self.threads)
        if self.threads == before:
            return None
        return (
            f"trainer.threads=free: {self.threads} instead of {before} threads from here, since other programs use "
            f"{load.others:.1f} of {load.cores} cores"
        )

    def settle(self) -> None:
        """Measure for a quarter of a second, and set the threads."""
        if self._last is not None:
            time.sleep(SHORTEST + 0.05)
            self.update()

    def _without_load(self, now: CpuTimes | None) -> str | None:
        """Return to torch's default; return a note at the first time."""
        self._last, self.threads = now, self.most
        torch.set_num_threads(self.most)
        if self._noted:
            return None
        self._noted = True
        return f"trainer.threads=free: {STAT} cannot be read here; torch's default of {self.most} threads is used"
