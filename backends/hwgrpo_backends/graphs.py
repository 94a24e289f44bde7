"""Device graphs: work that is recorded once and replayed as one launch.

Importing this module imports torch. Recording has run on an NVIDIA H100, never on an AMD GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """Recorded work. A replay repeats its operations on the memory that they had, whatever Python does meanwhile."""

    output: Any
    """Return value of the work; every replay overwrites its tensors."""

    def replay(self) -> None:
        """Submit the work once more."""
        ...

    def release(self) -> None:
        """Give the recording's memory back; it cannot be replayed any more."""
        ...


Recorder = Callable[[Callable[[], Any]], Recording]
"""Runs some work, perhaps more than once, and records it. The work must read and write the same tensors every time,
not wait for the device, and give the same when it is repeated. Its output is filled by the first `replay`."""


class CudaGraph:
    """A recording of work on the current CUDA or HIP device; see `Recording`.

    Source: the section on CUDA graphs in torch's notes on CUDA semantics.

    Args:
        work: see `Recorder`.

    Raises:
        RuntimeError: the work does something that a graph cannot hold, such as waiting for the device; its context
            is the cause. Older versions of torch cannot record or free memory afterwards.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        work()  # libraries allocate and choose algorithms at their first call, which a graph cannot hold
        self._graph = torch.cuda.CUDAGraph()
        # Where a recording fails, torch leaves its own stream current: the outer context puts ours back.
        # Other threads of this process may use the device meanwhile: those of collectives ask for finished events.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self.output = work()

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        torch.cuda.synchronize()  # the last replay may still be running
        self.output = None
        self._graph.reset()
