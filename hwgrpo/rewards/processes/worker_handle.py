"""The trainer's handle of one process that calls a user's function: start, call, read, kill."""

from __future__ import annotations

import contextlib
import json
import math
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
from hwgrpo.errors import ConfigError
from hwgrpo.rewards.failures import describe_exit
from hwgrpo.rewards.processes.worker_process import END_SECONDS, STACK_SIGNAL
from hwgrpo.rewards.randomness import Seed
from hwgrpo.support.child_processes import FIXED_HASHES, descendants
from hwgrpo.support.framed_messages import Reader, frame_message

START_SECONDS = 300.0
"""Seconds for a process to import the function's file: libraries on a cold network disk take minutes."""
EXIT_SECONDS = 1.0
"""Seconds for an idle process to exit by itself, so that atexit handlers of the function's file run."""
STACK_SECONDS = 0.2
POLL_SECONDS = 0.2
"""Interval of liveness checks while no message arrives."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[6]); "
    "from hwgrpo.rewards.processes.worker_process import main; main(sys.argv[7], *map(int, sys.argv[2:6]))"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_PACKAGE = str(Path(hwgrpo.__file__).parent)


class Child:
    """A process that serves calls of one function.

    Args:
        setup: settings for `serve`; and the working directory, folder.
        title: name of the process in lists of processes.
        serve: `module:function` of (setup, link), as for `worker_process.main`.
    """

    def __init__(self, setup: Mapping[str, Any], title: str, serve: str) -> None:
        self.ready = False
        self.stopped_a_call = False
        """Whether the process itself stopped a call since its leftover processes were last checked."""
        self.calls: dict[int, Any] = {}
        """Calls in flight: number -> arguments."""
        self.deadline = time.monotonic() + START_SECONDS
        """Time at which it is killed without a reply, on the clock of `time.monotonic`."""
        self._reader = Reader()
        self._outgoing = memoryview(b"")
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        life, self._life = os.pipe()
        self._whereabouts, whereabouts = os.pipe()
        child_ends = (requests, replies, life, whereabouts)
        argv = [title, *map(str, child_ends), json.dumps(sys.path), serve]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *argv],
                stdin=subprocess.DEVNULL,
                pass_fds=child_ends,
                start_new_session=True,
                cwd=setup["folder"],
                env={**FIXED_HASHES, **os.environ},
            )
        except OSError:
            self._close_pipes()
            raise
        finally:
            for descriptor in child_ends:
                os.close(descriptor)
        for descriptor in (self._requests, self._replies, self._whereabouts):
            os.set_blocking(descriptor, False)
        self.send(dict(setup))

    @property
    def idle(self) -> bool:
        """Whether it can accept calls."""
        return self.ready and not self.calls

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def readable(self) -> int:
        """The file descriptor of its replies."""
        return self._replies

    @property
    def writable(self) -> int | None:
        """The file descriptor for unsent requests; None when all are sent."""
        return self._requests if self._outgoing else None

    def send_calls(
        self, calls: Mapping[int, Any], size: int, timeout: float | None, deadline: float, seed: Seed
    ) -> None:
        """Send calls.

        Args:
            calls: number -> arguments.
            size: number of responses per call.
            timeout: seconds per call, enforced by the process for async functions.
            deadline: time at which it is killed without a reply, on the clock of `time.monotonic`.
            seed: seed of random numbers, together with the call's number.
        """
        assert self.idle
        self.calls, self.deadline = dict(calls), deadline
        self.send({"calls": list(calls.items()), "size": size, "timeout": timeout, "seed": seed})

    def send(self, message: Any) -> None:
        """Send a message, as much of it as the pipe takes now."""
        self._outgoing = memoryview(bytes(self._outgoing) + frame_message(pickle.dumps(message)))
        self.flush()

    @property
    def has_ended(self) -> bool:
        """Whether an idle process has ended: there is no answer that could have arrived."""
        return not self.alive or bool(wait_for_pipes(0.0, self._replies))

    @property
    def has_others(self) -> bool:
        """Whether a process that the function started is still alive."""
        return len(descendants(self._process.pid)) > 1  # the worker is one

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: there will be no more; it says how the process ended.
        """
        try:
            chunk = os.read(self._replies, 1 << 20)
        except BlockingIOError:
            # A process that it forked may keep the pipe open after its end.
            if not self.alive and not wait_for_pipes(0.0, self._replies):
                raise EOFError(describe_exit(self._process.returncode)) from None
            return
        if not chunk:
            self.wait(EXIT_SECONDS)
            raise EOFError(describe_exit(self._process.returncode))
        try:
            yield from self._reader.feed(chunk)
        except ValueError as error:
            raise EOFError(f"sent an invalid reply ({error})") from error

    def flush(self) -> None:
        """Write unsent bytes until the pipe is full."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing = memoryview(b"")  # it is dead, which `receive` reports

    def whereabouts(self) -> str:
        """Return " at FILE:LINE" of the innermost frame in the function's file; "" if unknown."""
        with contextlib.suppress(OSError):
            self._process.send_signal(STACK_SIGNAL)
            stack = b""
            until = time.monotonic() + STACK_SECONDS
            while wait_for_pipes(until - time.monotonic(), self._whereabouts):
                chunk = os.read(self._whereabouts, 1 << 16)
                if not chunk:
                    break
                stack += chunk
                until = min(until, time.monotonic() + STACK_SECONDS / 10)  # the rest comes at once
            frames = _FRAME.findall(stack.decode("utf-8", "replace"))  # innermost first
            entered = next((file for file, _ in reversed(frames) if _is_user_file(file)), None)
            for file, line in frames:
                if file == entered:
                    return f" at {file}:{line}"
        return ""

    def close_requests(self) -> None:
        """Close the request pipe, so that an idle process exits; call `kill` afterwards."""
        self._outgoing = memoryview(b"")
        with contextlib.suppress(OSError):
            os.close(self._requests)
        self._requests = -1

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        if self._life < 0:
            return  # killed before: the process group's id may be reused
        with contextlib.suppress(BrokenPipeError):
            os.write(self._life, b".")
        self.wait(2 * END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # left over if the supervisor itself was killed
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(END_SECONDS)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for descriptor in (self._requests, self._replies, self._life, self._whereabouts):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = self._life = self._whereabouts = -1


def wait_until_ready(child: Child, where: str) -> Mapping[str, Any]:
    """Wait until a process has loaded its function; return its "ready".

    Args:
        child: the process, just started.
        where: key and value of the setting, for messages.

    Raises:
        ConfigError: the process refused the setting, ended, or took too long.
    """
    while child.deadline > time.monotonic():
        wait_for_pipes(
            min(child.deadline - time.monotonic(), POLL_SECONDS),
            child.readable,
            writable=[] if child.writable is None else [child.writable],
        )
        child.flush()
        try:
            for message in child.receive():
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                child.ready, child.deadline = True, math.inf
                return message["ready"]
        except EOFError as end:
            raise ConfigError(f"{where}: its process {end} while it ran the file") from None
    raise ConfigError(f"{where}: running the file{child.whereabouts()} took longer than {START_SECONDS:g} s")


def end_children(children: list[Child], owner: int) -> None:
    """Let idle processes exit by themselves, and kill the others; a fork of the trainer, `owner`, does nothing."""
    if os.getpid() != owner:
        return
    deadline = time.monotonic() + EXIT_SECONDS
    for child in children:
        if child.idle:
            child.close_requests()
    for child in children:
        if child.ready and not child.calls:
            child.wait(deadline - time.monotonic())
        child.kill()
    children.clear()


def wait_for_pipes(seconds: float, *readable: int, writable: Sequence[int] = ()) -> set[int]:
    """Wait up to `seconds` until a pipe is readable or writable; return those that are."""
    poll = select.poll()
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}


def _is_user_file(file: str) -> bool:
    """Return whether a frame may be in the function's file: not in this package or the standard library."""
    return not file.startswith((_PACKAGE, "<", str(Path(os.__file__).parent)))
