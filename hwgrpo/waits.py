"""Waits that end: each has a bound, and prints what it waits for."""

from __future__ import annotations

import sys
import time

FIRST_REPORT = 5.0
"""Seconds after which a wait is reported."""
REPORT_EVERY = 60.0


class Wait:
    """A wait of at most some seconds; who waits calls `pause` until `over`.

    Args:
        what: what is waited for, as a noun.
        seconds: the bound.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._began = time.monotonic()
        self._next_report = self._began + FIRST_REPORT

    @property
    def left(self) -> float:
        """Seconds until the bound, at least 0."""
        return max(0.0, self._began + self._seconds - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the bound is reached."""
        return self.left == 0.0

    def pause(self, seconds: float) -> None:
        """Sleep, no longer than the bound; print what is waited for when it is time to."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_EVERY
            print(
                f"hwgrpo: waiting for {self._what}: {now - self._began:.0f} s of at most {self._seconds:g} s",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(seconds, self.left))
