"""Mutual exclusion of a thread that generates and one that exchanges weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hwgrpo.support.waits import STUCK_AFTER, wait_for_thread


class Stopped(Exception):
    """Request to end, raised in the generating thread at its next step."""


class Gate:
    """Lock that pauses the generating thread while another thread holds it.

    Args:
        between_steps: the generating thread pauses between two tokens; else only between two batches.
        timeout: seconds after which the other thread counts as hung.
    """

    def __init__(self, between_steps: bool = False, timeout: float = STUCK_AFTER) -> None:
        self._between_steps = between_steps
        self._timeout = timeout
        self._changed = threading.Condition()
        self._holders = 0
        self._finishing_batches = 0
        self._inside = False
        self._stopped = False
        self._on_stop: list[Callable[[], None]] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark the block as generating."""
        with self._changed:
            self._wait_for_weights()
            self.raise_if_stopped()
            self._inside = True
        try:
            yield
        finally:
            with self._changed:
                self._inside = False
                self._changed.notify_all()

    def step(self) -> None:
        """Pause between two tokens of the generating thread while another thread holds the gate."""
        with self._changed:
            self.raise_if_stopped()
            if self._holders and self._between_steps and not self._finishing_batches:
                self._inside = False
                self._changed.notify_all()
                self._wait_for_weights()
                self.raise_if_stopped()
                self._inside = True

    @contextmanager
    def held(self, *, finish_batch: bool = False) -> Iterator[None]:
        """Keep the generating thread paused during the block.

        Args:
            finish_batch: wait until it has finished its current batch.
        """
        with self._changed:
            self._holders += 1
            self._finishing_batches += finish_batch
        try:
            with self._changed:
                self._wait_until(lambda: not self._inside, "the rollout thread to pause")
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._finishing_batches -= finish_batch
                self._changed.notify_all()

    def stop(self) -> None:
        """End the generating thread at its next step, or before its next batch."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for abort in self._on_stop:
            abort()

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` in the generating thread if it is to end."""
        if self._stopped:
            raise Stopped

    def on_stop(self, abort: Callable[[], None]) -> None:
        """Have `stop` call a function that aborts what the generating thread waits for."""
        self._on_stop.append(abort)

    @property
    def stopped(self) -> bool:
        """Whether the generating thread is to end."""
        return self._stopped

    def _wait_for_weights(self) -> None:
        self._wait_until(lambda: not self._holders or self._stopped, "new weights of the rollout engine")

    def _wait_until(self, ready: Callable[[], bool], awaited: str) -> None:
        wait_for_thread(lambda seconds: self._changed.wait_for(ready, seconds), awaited, self._timeout)
