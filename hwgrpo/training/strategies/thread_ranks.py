"""Exchange of small values between ranks by a thread of its own in each process, beside that of the training thread."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

PAUSE = 0.001
"""Seconds between two looks at whether an exchange is over."""


@dataclass
class ThreadRanks:
    """Ranks of threads. An exchange looks for requests to end: a rank whose thread has ended never joins it."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    """A gloo group that only these threads use."""
    stopped: Callable[[], None]
    """Raises where the thread is to end."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(own)]))]
        padded = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
        parts = self._gather(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        work = dist.all_gather(parts, values, group=self.group, async_op=True)
        assert work is not None
        while not work.is_completed():
            self.stopped()
            time.sleep(PAUSE)
        work.wait()
        return parts
