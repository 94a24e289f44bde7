"""Ctrl-C, SIGTERM and SIGHUP end a run at the next step boundary, with a checkpoint; a second one ends it at once.

A second SIGHUP does not: a terminal that closes may send several, and SIGTERM at a logout is followed by one. Where
SIGHUP was ignored when the run started, as nohup does, it stays ignored. Nor does a SIGTERM within seconds of the
first: a cluster's scheduler sends it to all processes, and torchrun passes its own on to its workers.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SAME_REQUEST = 10.0
"""Seconds in which a further SIGTERM is the one that came before."""


class Interrupt:
    """Remembers that the run was asked to stop. Use as a context manager around the loop.

    Handlers are only set in the main thread, where Python allows them; elsewhere the object does nothing.
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
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGTERM and self.received == "SIGTERM":
            if time.monotonic() - self._first > SAME_REQUEST:
                raise KeyboardInterrupt
        elif number != signal.SIGHUP:
            raise KeyboardInterrupt
