"""A time limit for chat templates: Jinja's sandbox bounds what they may call, not how long nested loops run."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hwgrpo.errors import DataError

LIMIT = 60.0
"""Seconds for one conversation; templates take milliseconds."""
LOOK_EVERY = 1.0


class _Overran(Exception):
    """Raised in a thread whose template overran the limit."""


class _Watch:
    """Thread that looks at the templates that are rendered now, and ends those that overran."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._began: dict[int, float] = {}
        threading.Thread(target=self._look, name="time limit of chat templates", daemon=True).start()

    def begin(self) -> None:
        """Begin a template in this thread."""
        self._began[threading.get_ident()] = time.monotonic()

    def end(self) -> None:
        """End it; from here on this thread is not interrupted."""
        if self._began.pop(threading.get_ident(), None) is None:  # taken by `_look`: the interruption arrives here
            for _ in range(1000):
                time.sleep(0.01)

    def _look(self) -> None:
        while True:
            time.sleep(min(LOOK_EVERY, LIMIT))
            for thread, began in list(self._began.items()):
                # what this thread takes out, the other one cannot: it is interrupted once, and within its block
                if time.monotonic() - began > LIMIT and self._began.pop(thread, None) is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Overran))


_watches: list[_Watch] = []
"""The watch of this process; a forked child has no thread of its parent's."""


@contextmanager
def template_limit(place: str) -> Iterator[None]:
    """End the rendering of a template in the block where it takes too long.

    Args:
        place: the conversation, for the message.

    Raises:
        DataError: it took more than `LIMIT` seconds.
    """
    if not _watches or _watches[0].process != os.getpid():
        _watches[:] = [_Watch()]
    watch = _watches[0]
    watch.begin()
    try:
        try:
            yield
        except _Overran:
            raise
        except BaseException:
            watch.end()
            raise
        watch.end()
    except _Overran:
        raise DataError(
            f"{place}: the chat template takes more than {LIMIT:g} s for this conversation; correct its loops, or set "
            "model.chat_template to a file with another one"
        ) from None
