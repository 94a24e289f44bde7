"""Ctrl-C, SIGTERM and SIGHUP end a run after the current step, with a checkpoint; a second one ends it at once.

Two exceptions: a second SIGHUP (a closing terminal may send several, and at a logout one follows SIGTERM), and a
SIGTERM within seconds of the first (a cluster's scheduler sends it to all processes, and torchrun forwards its own to
its workers). If SIGHUP was ignored at the start, as under nohup, it stays ignored.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SAME_REQUEST = 10.0
"""Seconds in which a further SIGTERM counts as the same request."""


class Interrupt:
    """Records a request to stop the run. Use as a context manager around the loop.

    Python allows signal handlers only in the main thread; in another thread the object does nothing. Entered again, it
    remembers the first request.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # garbage collection closes an unfinished loop, in any thread
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGTERM and self.received == "SIGTERM":
            if time.monotonic() - self._first > SAME_REQUEST:
                raise KeyboardInterrupt
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt
