"""Code that runs an event loop of its own, also where one runs already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_outside_loops(function: Callable[[], T]) -> T:
    """Call a function in a thread where no event loop runs; return its result.

    Args:
        function: runs an event loop, as by `asyncio.run`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    # a loop already runs in this thread (a notebook) and cannot be entered again
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()
