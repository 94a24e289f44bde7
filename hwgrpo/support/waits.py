"""Waits with a time limit, which print their progress."""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hwgrpo.errors import RunError

FIRST_REPORT = 5.0
"""Seconds after which a wait is reported."""
REPORT_EVERY = 60.0
STUCK_AFTER = 7200.0
"""Seconds after which another thread of this process counts as hanging; default of trainer.process_group_timeout."""
LONG_WORK = 600.0
"""Seconds after which a wait for a working thread (generating, writing) is reported."""


class Wait:
    """A wait with a time limit; call `pause` until `over`.

    Args:
        what: the awaited event, as a noun; a function is called for each report.
        seconds: the time limit; infinite: none.
        first_report: seconds after which the wait is reported; None: FIRST_REPORT.
    """

    def __init__(self, what: str | Callable[[], str], seconds: float, *, first_report: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._began = time.monotonic()
        self._next_report = self._began + (FIRST_REPORT if first_report is None else first_report)

    @property
    def left(self) -> float:
        """Seconds until the time limit, at least 0."""
        return max(0.0, self._began + self._seconds - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the time limit is reached."""
        return self.left == 0.0

    def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the time limit; print a report if one is due."""
        self.report()
        time.sleep(min(seconds, self.left))

    def report(self) -> None:
        """Print the wait's progress if a report is due."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_EVERY
            what = self._what if isinstance(self._what, str) else self._what()
            limit = f" of at most {self._seconds:g} s" if math.isfinite(self._seconds) else ""
            print(f"hwgrpo: waiting for {what}: {now - self._began:.0f} s{limit}", file=sys.stderr, flush=True)


@contextmanager
def reported_wait(what: str | Callable[[], str], seconds: float) -> Iterator[None]:
    """Print, from another thread, the progress of a call in the block that waits by itself; arguments as for `Wait`."""
    wait, done = Wait(what, seconds), threading.Event()

    def report() -> None:
        while not done.wait(1.0):
            wait.report()

    thread = threading.Thread(target=report, name="report of a wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(1.0)  # it may be printing


def join_thread(thread: threading.Thread, what: str, seconds: float) -> None:
    """Wait for the end of a thread; arguments and errors as `wait_for_thread`."""

    def ended(timeout: float) -> bool:
        thread.join(timeout)
        return not thread.is_alive()

    wait_for_thread(ended, what, seconds)


def wait_for_thread(done: Callable[[float], bool], what: str, seconds: float) -> None:
    """Wait for another thread of this process.

    Args:
        done: blocks for at most that many seconds and returns whether the wait is over, e.g. the `wait` of an event.
        what: the awaited event, as a noun.
        seconds: the time limit, trainer.process_group_timeout.

    Raises:
        RunError: the time limit is reached; the stacks of all threads are printed first.
    """
    wait = Wait(what, seconds, first_report=LONG_WORK)
    while not done(min(REPORT_EVERY, wait.left)):
        if wait.over:
            faulthandler.dump_traceback(all_threads=True)
            raise RunError(
                f"waited {seconds:g} s for {what}: the thread seems to hang (the stacks of all threads are above); "
                "start again from the newest checkpoint; if the work is only slow, raise trainer.process_group_timeout"
            )
        wait.report()
