"""Tools in processes of their own, which can be killed.

A thread per tool distributes calls over its processes, enforces timeouts and replaces processes that ended, so that
calls may come from any event loop, also from several. Processes are `rewards.processes.worker_handle.Child`s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hwgrpo.agents.action import ToolResult, nothing
from hwgrpo.agents.tool_results import shorten, unpack_result
from hwgrpo.agents.tool_schema import MalformedCall, typed_arguments
from hwgrpo.errors import error_text
from hwgrpo.rewards.processes.worker_handle import (
    POLL_SECONDS,
    START_SECONDS,
    Child,
    end_children,
    wait_for_pipes,
    wait_until_ready,
)
from hwgrpo.user_code import imported_plugins

GRACE_SECONDS = 1.0
"""Seconds that a call of an async function gets above its timeout: its process cancels it, unless it hangs."""
CLOSE_SECONDS = 60.0
"""Seconds for all processes of a tool to end: each is killed with what it started."""
ASYNC_CALLS = 8
"""Calls of an async function that a process makes at once."""
SERVE = "hwgrpo.agents.tool_worker:serve"


class ProcessTool:
    """A function in `path/to/file.py:function` as a `Tool`, called in processes of its own.

    A call that takes longer than `timeout` is stopped, with all processes that it started: in C code, too. Where a
    process ends or is blocked with several calls of an async function in it, they are made once more, each alone in a
    process, but for the one whose time is over first: a call of such a function may be made twice.

    Args:
        setting: `path/to/file.py:function`.
        kwargs: arguments that the model neither sees nor sets.
        key: the tool's setting, for messages ("rollout.agent.tools.0").
        timeout: seconds per call.
        workers: number of processes; the first is started now, the others on demand.
        max_chars: longest result.
        truncate: side of a longer one that is left out.
        folder: working directory of the processes.

    Raises:
        ConfigError: there is no such function, its file does not load, or it has no schema.
    """

    def __init__(
        self,
        setting: str,
        kwargs: Mapping[str, Any],
        *,
        key: str,
        timeout: float,
        workers: int,
        max_chars: int,
        truncate: str,
        folder: str,
    ) -> None:
        setup = {"tool": setting, "kwargs": dict(kwargs), "key": key, "max_chars": max_chars, "truncate": truncate}
        setup |= {"folder": folder, "plugins": imported_plugins()}
        first = _start({**setup, "describe": True})
        try:
            ready = wait_until_ready(first, f"{key}.name={setting!r}")
        except BaseException:
            first.kill()
            raise
        self.schema: Mapping[str, Any] = ready["schema"]
        self.name: str = self.schema["function"]["name"]
        self._max_chars, self._side = max_chars, truncate
        self._processes = _Processes(setup, self.name, first, workers, timeout, ready["is_async"])

    async def call(self, arguments: Mapping[str, Any], begun: Callable[[], None] = nothing) -> ToolResult:
        """Return the result for arguments of the policy's; failures are results, too."""
        try:
            checked = typed_arguments(self.schema, arguments)
        except MalformedCall as error:
            return ToolResult(shorten(f"Error: {error}", self._max_chars, self._side), "malformed")
        return await asyncio.wrap_future(self._processes.submit(checked, begun))

    def close(self) -> None:
        """End the processes; calls that are not done return as `died`."""
        self._processes.close()


@dataclass
class _Call:
    number: int
    arguments: Mapping[str, Any]
    begun: Callable[[], None]
    future: Future[ToolResult] = field(default_factory=Future)
    alone: bool = False
    """Whether it is made for the second time, alone in a process."""
    started: float = math.inf
    deadline: float = math.inf

    def start(self) -> bool:
        """Return whether the call is to be made: nobody cancelled it."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def finish(self, text: str, failure: str) -> None:
        """Return a failure to whoever waits for the call."""
        self.future.set_result(ToolResult(f"Error: {text}", failure, max(0.0, time.monotonic() - self.started)))


class _Processes:
    """The processes of one tool, and the thread that serves them.

    Args:
        setup: settings that they load.
        name: of the tool, for messages.
        first: a process that is ready.
        size: largest number of processes.
        timeout: seconds per call.
        is_async: whether a process makes several calls at once, and cancels those that are late.
    """

    def __init__(
        self, setup: Mapping[str, Any], name: str, first: Child, size: int, timeout: float, is_async: bool
    ) -> None:
        self._setup, self._name, self._size, self._timeout = setup, name, size, timeout
        self._each = ASYNC_CALLS if is_async else 1
        self._grace = GRACE_SECONDS if is_async else 0.0
        self._children = [first]
        self._queued: deque[_Call] = deque()
        self._numbers = itertools.count()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closing = False
        self._woken, self._wakes = os.pipe()
        for descriptor in (self._woken, self._wakes):
            os.set_blocking(descriptor, False)
        self._thread = threading.Thread(target=self._serve, name=f"tool {name}", daemon=True)
        self._thread.start()

    def submit(self, arguments: Mapping[str, Any], begun: Callable[[], None]) -> Future[ToolResult]:
        """Queue a call; return its result's future. A call that is cancelled before it is made is not made.

        Args:
            arguments: of the call.
            begun: called when the call is sent to a process.
        """
        call = _Call(next(self._numbers), arguments, begun)
        with self._lock:
            assert not self._closing, "the tool is closed"
            self._queued.append(call)
            self._wake()
        return call.future

    def close(self) -> None:
        """End the processes and the thread."""
        if os.getpid() != self._owner:
            return  # a fork of the trainer has no such thread
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._woken)
            os.close(self._wakes)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake when the pipe is full
            os.write(self._wakes, b".")

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._distribute()
                self._wait()
                for child in list(self._children):
                    self._attend(child)
        finally:
            with self._lock:
                self._closing = True
            left = [call for child in self._children for call in child.calls.values()]
            for call in [*left, *(each for each in self._queued if each.start())]:
                call.finish(f"{self._name} was closed", "died")
            end_children(self._children, self._owner)

    def _distribute(self) -> None:
        """Send queued calls to processes with room, and start processes for the others."""
        for child in [each for each in self._children if each.idle]:
            if child.has_ended or (child.stopped_a_call and child.has_others):
                self._drop(child)
            child.stopped_a_call = False
        while self._queued:
            call = self._queued[0]
            child = next((each for each in self._children if self._has_room(each, call)), None)
            if child is None:
                break
            self._queued.popleft()
            if not call.start():
                continue
            call.started = time.monotonic()
            call.begun()
            call.deadline = call.started + self._timeout + self._grace
            child.calls[call.number] = call
            child.send({"number": call.number, "arguments": call.arguments, "timeout": self._timeout})
        starting = sum(not each.ready for each in self._children)
        missing = math.ceil(len(self._queued) / self._each) - starting
        for _ in range(min(missing, self._size - len(self._children))):
            try:
                self._children.append(_start({**self._setup, "describe": False}))
            except OSError as error:
                self._fail_next(f"cannot be started: {error_text(error)}")
                return

    def _has_room(self, child: Child, call: _Call) -> bool:
        calls = child.calls.values()
        return child.ready and len(calls) < (1 if call.alone else self._each) and not any(each.alone for each in calls)

    def _wait(self) -> None:
        """Send what is unsent, and wait until there is something to do."""
        writable = [each.writable for each in self._children if each.writable is not None]
        active = [each for each in self._children if not each.idle]
        nearest = min((_deadline(each) for each in active), default=math.inf)
        seconds = min(nearest - time.monotonic(), POLL_SECONDS if active else 3600.0)
        able = wait_for_pipes(seconds, self._woken, *(each.readable for each in self._children), writable=writable)
        for child in self._children:
            if child.writable in able:
                child.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)

    def _attend(self, child: Child) -> None:
        """Return the results that have arrived, and replace a process that ended or hangs."""
        # also a late one is read first: the trainer itself may have been stopped for a while
        ended = self._receive(child)
        if ended is None and _deadline(child) < time.monotonic():
            place = child.whereabouts()
            ended = f"did not load within {START_SECONDS:g} s{place}" if not child.ready else "was stopped"
        if ended is None:
            return
        self._drop(child)
        if not child.ready:
            self._fail_next(ended)
            return
        calls = sorted(child.calls.values(), key=lambda call: call.deadline)
        if calls and calls[0].deadline < time.monotonic():
            calls.pop(0).finish(self._late(), "timeout")
        elif len(calls) == 1:
            calls.pop().finish(f"{self._name} lost its process, which {ended}", "died")
        for call in reversed(calls):  # any of them may have ended or blocked the process: each is made alone
            call.alone = True
            self._queued.appendleft(call)

    def _fail_next(self, why: str) -> None:
        """End the next call, which a new process was to make: else a tool that cannot start would start forever."""
        if self._queued and (call := self._queued.popleft()).start():
            call.finish(f"{self._name} is not available: a new process of it {why}", "died")

    def _receive(self, child: Child) -> str | None:
        """Return the results that have arrived to their callers; return how the process ended, if it did."""
        try:
            for message in self._messages(child):
                if not child.ready:
                    if "ready" not in message:
                        return f"refused: {message.get('refused')}"
                    child.ready, child.deadline = True, math.inf
                    continue
                call = child.calls.pop(message.get("number", -1), None)
                if call is None:
                    return "sent an invalid reply"
                child.stopped_a_call |= "overran" in message
                self._finish(call, message)
        except EOFError as end:
            return str(end)
        return None

    def _messages(self, child: Child) -> Iterator[dict[str, Any]]:
        while wait_for_pipes(0.0, child.readable):
            yield from child.receive()

    def _finish(self, call: _Call, message: Mapping[str, Any]) -> None:
        if "overran" in message:
            call.finish(self._late(), "timeout")
        elif "raised" in message:  # its result could not be sent
            call.finish(f"{message['raised'][0]}: {message['raised'][1]}", "error")
        else:
            call.future.set_result(unpack_result(message, time.monotonic() - call.started))

    def _late(self) -> str:
        return f"{self._name} took longer than {self._timeout:g} s and was stopped"

    def _drop(self, child: Child) -> None:
        self._children.remove(child)
        child.kill()


def _start(setup: Mapping[str, Any]) -> Child:
    return Child(setup, f"hwgrpo tool {setup['tool']}", SERVE)


def _deadline(child: Child) -> float:
    """Return when a process is killed, on the clock of `time.monotonic`."""
    if not child.ready:
        return child.deadline
    return min((call.deadline for call in child.calls.values()), default=math.inf)
