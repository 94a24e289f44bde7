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


def run_in_background(coroutine: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
    """Run a coroutine in the background loop; return its result.

    Args:
        coroutine: it is cancelled after the time limit.
        seconds: the time limit; None: none.

    Raises:
        TimeoutError: it took longer.
    """
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, seconds), background_loop()).result()
