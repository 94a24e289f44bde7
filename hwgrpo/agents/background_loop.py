"""One event loop per process, in a thread of its own, for coroutines of the user's that share connections."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process's event loop for coroutines of the user's; it runs until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines of the user's", daemon=True).start()
    return loop


LONGEST = 3600.0
"""Seconds of a call without a time limit of its own."""
_GRACE = 10.0
"""Seconds that the loop may take to cancel a coroutine, before it counts as blocked."""


def run_in_background(coroutine: Coroutine[Any, Any, Any], seconds: float = LONGEST) -> Any:
    """Run a coroutine in the background loop; return its result.

    Args:
        coroutine: it is cancelled after the time limit.
        seconds: the time limit.

    Raises:
        TimeoutError: it took longer, or another coroutine blocks the loop.
    """
    running = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, seconds), background_loop())
    return running.result(seconds + _GRACE)
