"""One process of a reward function, as the trainer sees it: started, given calls, read from, killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hwgrpo
from hwgrpo.rewards.failures import how_it_ended
from hwgrpo.rewards.processes.descendants import descendants
from hwgrpo.rewards.processes.messages import Reader, framed
from hwgrpo.rewards.processes.reward_worker import END_SECONDS, WHERE
from hwgrpo.rewards.randomness import Seed

START_SECONDS = 300.0
"""Longest that a process may take to import the function's file: libraries on a cold network disk take minutes."""
LEAVE_SECONDS = 1.0
"""What an idle process is given to end by itself, so that what the function's file registered with atexit runs."""
STACK_SECONDS = 0.2
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[6]); "
    "from hwgrpo.rewards.processes.reward_worker import main; main(*map(int, sys.argv[2:6]))"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_PACKAGE = str(Path(hwgrpo.__file__).parent)


class Child:
    """A process that serves calls of one reward function.

    Args:
        setup: what `worker.main` loads: reward, name, kwargs, context, key; and the working directory, folder.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.ready = False
        self.stopped_a_call = False
        """Whether the process itself stopped a call since it was last looked at what that left."""
        self.calls: dict[int, Any] = {}
        """The calls it was given and has not answered: number -> arguments."""
        self.deadline = time.monotonic() + START_SECONDS
        """When it is killed unless it answers before."""
        self._reader = Reader()
        self._outgoing = memoryview(b"")
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        life, self._life = os.pipe()
        self._whereabouts, whereabouts = os.pipe()
        theirs = (requests, replies, life, whereabouts)
        words = [f"hwgrpo reward {setup['reward']}", *map(str, theirs), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
                cwd=setup["folder"],
            )
        except OSError:
            self._close_pipes()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._requests, self._replies, self._whereabouts):
            os.set_blocking(descriptor, False)
        self._send(dict(setup))

    @property
    def idle(self) -> bool:
        """Whether it can be given calls."""
        return self.ready and not self.calls

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def readable(self) -> int:
        """The file descriptor on which its answers arrive."""
        return self._replies

    @property
    def writable(self) -> int | None:
        """The file descriptor that takes what is still to be sent; None when all is."""
        return self._requests if self._outgoing else None

    def give(self, calls: Mapping[int, Any], size: int, timeout: float | None, deadline: float, seed: Seed) -> None:
        """Have calls made.

        Args:
            calls: number -> arguments.
            size: responses that a call is about.
            timeout: seconds for each of them, as the process keeps it; it does so for async functions.
            deadline: when it is killed unless it answers before, on the clock of `time.monotonic`.
            seed: what the random numbers that a call draws depend on, together with its number.
        """
        assert self.idle
        self.calls, self.deadline = dict(calls), deadline
        self._send({"calls": list(calls.items()), "size": size, "timeout": timeout, "seed": seed})

    @property
    def has_ended(self) -> bool:
        """Whether an idle process has ended: there is no answer that could have arrived."""
        return not self.alive or bool(arrived(0.0, self._replies))

    @property
    def has_others(self) -> bool:
        """Whether something that the function started is still there."""
        return len(descendants(self._process.pid)) > 1  # the worker is one

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: there will be no more; it says how the process ended.
        """
        try:
            piece = os.read(self._replies, 1 << 20)
        except BlockingIOError:
            # A copy that it forked may hold the pipe open after its end.
            if not self.alive and not arrived(0.0, self._replies):
                raise EOFError(how_it_ended(self._process.returncode)) from None
            return
        if not piece:
            self.wait(LEAVE_SECONDS)
            raise EOFError(how_it_ended(self._process.returncode))
        try:
            yield from self._reader.feed(piece)
        except ValueError as error:
            raise EOFError(f"sent an invalid reply ({error})") from error

    def flush(self) -> None:
        """Send what the pipe takes now."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing = memoryview(b"")  # it is dead, which reading tells

    def whereabouts(self) -> str:
        """Return the line of the function's own file that the process is at, in words; "" when that cannot be told."""
        with contextlib.suppress(OSError):
            self._process.send_signal(WHERE)
            stack = b""
            until = time.monotonic() + STACK_SECONDS
            while arrived(until - time.monotonic(), self._whereabouts):
                piece = os.read(self._whereabouts, 1 << 16)
                if not piece:
                    break
                stack += piece
                until = min(until, time.monotonic() + STACK_SECONDS / 10)  # the rest comes at once
            frames = _FRAME.findall(stack.decode("utf-8", "replace"))  # innermost first
            entered = next((file for file, _ in reversed(frames) if _is_theirs(file)), None)
            for file, line in frames:
                if file == entered:
                    return f" at {file}:{line}"
        return ""

    def let_go(self) -> None:
        """Tell an idle process that there is no more; `kill` it after."""
        self._outgoing = memoryview(b"")
        with contextlib.suppress(OSError):
            os.close(self._requests)
        self._requests = -1

    def wait(self, seconds: float) -> None:
        """Wait for its end, for so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        if self._life < 0:
            return  # done before: the number of the group may be another's now
        with contextlib.suppress(BrokenPipeError):
            os.write(self._life, b".")
        self.wait(2 * END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what a supervisor left that was killed itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(END_SECONDS)
        self._close_pipes()

    def _send(self, message: Any) -> None:
        self._outgoing = memoryview(bytes(self._outgoing) + framed(pickle.dumps(message)))
        self.flush()

    def _close_pipes(self) -> None:
        for descriptor in (self._requests, self._replies, self._life, self._whereabouts):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = self._life = self._whereabouts = -1


def arrived(seconds: float, *readable: int, writable: Sequence[int] = ()) -> set[int]:
    """Wait until a pipe can be read or written, for so long at most; return those that can."""
    poll = select.poll()
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def _is_theirs(file: str) -> bool:
    """Whether a line of the stack may be the function's file: neither ours, nor Python's own."""
    return not file.startswith((_PACKAGE, "<", str(Path(os.__file__).parent)))
