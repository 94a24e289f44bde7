"""Awaiting async reward functions from synchronous code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.user_code import raised_by_user_code


def wait_for(value: Any) -> Any:
    """Return a value, after awaiting it if it comes from an async function."""
    if not inspect.isawaitable(value):
        return value
    result = _run(_awaited(value))
    if isinstance(result, BaseException):
        raise result
    return result


def wait_for_all(values: list[Any]) -> list[Any]:
    """Await all awaitables of a list concurrently; an exception replaces the value of one that raises."""
    awaitable = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    if not awaitable:
        return values

    async def gather() -> list[Any]:
        return await asyncio.gather(*(_awaited(values[number]) for number in awaitable))

    values = list(values)
    for number, result in zip(awaitable, _run(gather()), strict=True):
        if isinstance(result, ConfigError):
            raise result
        values[number] = result
    return values


async def _awaited(value: Awaitable[Any]) -> Any:
    """Return the result of an awaitable, or its exception: SystemExit in one task would end the loop of all."""
    try:
        return await value
    except BaseException as error:
        if not raised_by_user_code(error):
            raise
        return error


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A loop already runs in this thread (a notebook) and cannot be entered again: use a loop in another thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
