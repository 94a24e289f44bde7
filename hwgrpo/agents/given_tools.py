"""Python functions that a trainer was given as tools: they are called in threads of its own process.

A closure cannot be sent to a process. So a call that never returns cannot be killed: after its time limit the thread is
abandoned, and goes on in the background. An `async` function is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hwgrpo.agents.action import ToolResult, nothing
from hwgrpo.agents.background_loop import LONGEST, background_loop
from hwgrpo.agents.tool_results import pack_result, unpack_result
from hwgrpo.agents.tool_schema import MalformedCall, typed_arguments
from hwgrpo.errors import error_text
from hwgrpo.user_code import describe_error


class GivenTool:
    """A function as a `Tool`.

    Args:
        function: it may be `async`.
        schema: its JSON schema.
        kwargs: arguments that the policy neither sees nor sets.
        timeout: seconds per call.
        workers: calls that run at once.
        max_chars: longest result.
        truncate: side of a longer one that is left out.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        schema: Mapping[str, Any],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout: float,
        workers: int,
        max_chars: int,
        truncate: str,
    ) -> None:
        self.name: str = schema["function"]["name"]
        self.schema = schema
        self._function, self._kwargs, self._timeout = function, dict(kwargs), timeout
        self._free, self._limits = threading.Semaphore(workers), (max_chars, truncate)

    async def call(self, arguments: Mapping[str, Any], begun: Callable[[], None] = nothing) -> ToolResult:
        """Return the result for arguments of the policy's; failures are results, too."""
        started = time.monotonic()

        def made() -> None:
            nonlocal started
            started = time.monotonic()
            begun()

        try:
            value = await self.run(typed_arguments(self.schema, arguments), made)
        except MalformedCall as error:
            value = ToolResult(f"Error: {error}", "malformed")
        except TimeoutError:
            value = ToolResult(f"Error: {self.name} took longer than {self._timeout:g} s", "timeout")
        except Exception as error:
            value = ToolResult(f"Error: {type(error).__name__}: {error_text(error)}", "error")
        return unpack_result(pack_result(value, *self._limits), time.monotonic() - started)

    async def run(self, arguments: Mapping[str, Any], begun: Callable[[], None] = nothing) -> Any:
        """Return what the function returns; its exceptions are raised.

        Raises:
            TimeoutError: it took longer than the time limit, which begins when a place is free for the call.
        """
        arguments = {**arguments, **self._kwargs}
        if inspect.iscoroutinefunction(self._function):
            begun()
            running = asyncio.run_coroutine_threadsafe(self._function(**arguments), background_loop())
            return await asyncio.wait_for(asyncio.wrap_future(running), self._timeout)
        loop = asyncio.get_running_loop()
        started, done = loop.create_future(), loop.create_future()
        place = _Place(self._free)

        def run() -> None:
            value, error = None, None
            if not place.enter():
                _tell(loop, started, None, TimeoutError())
                return
            if place.unwanted:
                place.leave()
                return
            _tell(loop, started, None, None)
            try:
                value = self._function(**arguments)
            except BaseException as raised:  # of user code, in a thread of its own: `exit()` must not end it silently
                error = raised if isinstance(raised, Exception) else RuntimeError(describe_error(raised))
            place.leave()
            _tell(loop, done, value, error)

        threading.Thread(target=run, name=f"tool {self.name}", daemon=True).start()
        try:
            await started
            begun()
        finally:
            place.unwanted = started.cancelled()
        try:
            return await asyncio.wait_for(done, self._timeout)
        finally:
            if done.cancelled():
                place.leave()  # the thread is abandoned, and another call begins

    def close(self) -> None:
        """Do nothing: threads end with their calls."""


class _Place:
    """A place among the calls that run at once, which is given up once."""

    def __init__(self, free: threading.Semaphore) -> None:
        self._free, self._lock, self._left = free, threading.Lock(), False
        self.unwanted = False
        """Whether the call was cancelled before it had the place: it is not made."""

    def enter(self) -> bool:
        return self._free.acquire(timeout=LONGEST)

    def leave(self) -> None:
        with self._lock:
            if not self._left:
                self._left = True
                self._free.release()


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any, error: BaseException | None
) -> None:
    """Set a future of another thread's loop, if anyone still waits for it."""

    def tell() -> None:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)
