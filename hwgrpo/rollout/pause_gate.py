"""A thread that generates and one that exchanges weights, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hwgrpo.waits import STUCK_AFTER, wait_for_thread


class Stopped(Exception):
    """Raised in the generating thread at its next step when it is to end."""


class Gate:
    """Lets the generating thread through while nobody holds the gate.

    Args:
        between_steps: the generating thread makes way between two tokens; else only when its batch is done.
        timeout: seconds after which the other thread is taken to hang.
    """

    def __init__(self, between_steps: bool = False, timeout: float = STUCK_AFTER) -> None:
        self._between_steps = between_steps
        self._timeout = timeout
        self._changed = threading.Condition()
        self._holders = 0
        self._whole_batches = 0
        self._inside = False
        self._stopped = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Generate within the block."""
        with self._changed:
            self._wait_for_weights()
            self._check()
            self._inside = True
        try:
            yield
        finally:
            with self._changed:
                self._inside = False
                self._changed.notify_all()

    def step(self) -> None:
        """Make way, between two tokens of the generating thread, for who waits to hold the gate."""
        with self._changed:
            self._check()
            if self._holders and self._between_steps and not self._whole_batches:
                self._inside = False
                self._changed.notify_all()
                self._wait_for_weights()
                self._check()
                self._inside = True

    @contextmanager
    def held(self, *, whole_batch: bool = False) -> Iterator[None]:
        """Keep the generating thread out of the block, as soon as it makes way.

        Args:
            whole_batch: it finishes the batch it is at first.
        """
        with self._changed:
            self._holders += 1
            self._whole_batches += whole_batch
        try:
            with self._changed:
                self._until(lambda: not self._inside, "the rollout thread to pause")
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._whole_batches -= whole_batch
                self._changed.notify_all()

    def stop(self) -> None:
        """End the generating thread at its next step, or before its next batch."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether the generating thread is to end."""
        return self._stopped

    def _wait_for_weights(self) -> None:
        self._until(lambda: not self._holders or self._stopped, "new weights of the rollout engine")

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        wait_for_thread(lambda seconds: self._changed.wait_for(ready, seconds), what, self._timeout)

    def _check(self) -> None:
        if self._stopped:
            raise Stopped
