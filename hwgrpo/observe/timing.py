"""Seconds per stage of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PREFIX = "timing_s/"


class Stopwatch:
    """Adds up the seconds of each stage: `with watch("gen"): ...`, then `watch.take()` once per step.

    Args:
        synchronize: called at both ends of a stage, so that work queued on a device counts for the stage that queued
            it; None where work runs as it is called.
        clock: seconds from any origin, never going back.
        trace: returns a context that names a range for a profiler: each stage is one, under its name.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock
        self._trace = trace
        self._seconds: dict[str, float] = {}
        self.failed: str | None = None
        """The innermost stage that the last exception left; None while there was none."""
        self._leaving = False  # an exception is on its way out of stages; the error itself would keep a model alive

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the block as part of `stage`; stages may nest, and a stage may run several times in a step."""
        self._leaving = False
        self._synchronize()
        start = self._clock()
        try:
            with self._trace(stage):
                yield
                self._synchronize()
        except BaseException:
            if not self._leaving:
                self.failed, self._leaving = stage, True
            raise
        finally:
            # A stage that raises is counted without synchronizing: the device may be what failed.
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Return `{"timing_s/<stage>": seconds}` since the last call and start again from nothing."""
        taken = {PREFIX + stage: seconds for stage, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
