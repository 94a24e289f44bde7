"""Ctrl-C and SIGTERM end a run at the next step boundary, with a checkpoint; a second one ends it at once.

A cluster's scheduler sends its signal to all processes, and torchrun passes its own on to its workers: what comes twice
within seconds is one request.
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
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number).name, time.monotonic()
        elif number != signal.SIGTERM or time.monotonic() - self._first > SAME_REQUEST:
            raise KeyboardInterrupt
