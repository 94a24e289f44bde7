"""Awaiting async reward functions from synchronous code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.failures import Cancelled
from hwgrpo.user_code import raised_by_user_code


def wait_for(value: Any) -> Any:
    """Return a value, after awaiting it if it comes from an async function."""
    (result,) = wait_for_all([value])
    if isinstance(result, BaseException) and inspect.isawaitable(value):
        raise result
    return result


def wait_for_all(values: list[Any]) -> list[Any]:
    """Await all awaitables of a list concurrently; an exception replaces the value of one that raises."""
    awaitable = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    if not awaitable:
        return values
    values = list(values)
    for number, result in zip(awaitable, _run([values[number] for number in awaitable]), strict=True):
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


def _run(values: list[Awaitable[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(values)
    # A loop already runs in this thread (a notebook) and cannot be entered again: use a loop in another thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_here, values).result()


def _run_here(values: list[Awaitable[Any]]) -> list[Any]:
    results = run_concurrently([_awaited(value) for value in values])
    for value, result in zip(values, results, strict=True):
        if isinstance(result, Cancelled):
            getattr(value, "close", int)()  # it may never have begun
    return results


def run_concurrently(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines in an event loop of their own; return their results, an exception in place of one that raises.

    What waits for the tasks is no task: a function could cancel it with all others.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        tasks = [loop.create_task(each) for each in coroutines]
        results = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    return [Cancelled() if task.cancelled() else result for task, result in zip(tasks, results, strict=True)]
