"""A process that serves calls of a user's code: its start, its supervisor, and its pipes.

It is a new interpreter, without the trainer's threads, locks or devices, and imports the user's file itself. First it
forks: the child becomes the worker, the parent its supervisor. The supervisor waits for the end of the worker or of
the trainer, kills all its descendants, and exits with the worker's status.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from hwgrpo.errors import ConfigError, error_text
from hwgrpo.rewards.processes.messages import encode_reply
from hwgrpo.support.child_processes import adopt_orphans, end_descendants, reap
from hwgrpo.support.framed_messages import HEADER, frame_message
from hwgrpo.user_code import source_line

END_SECONDS = 5.0
"""Seconds for all processes to end; only one that waits for a disk takes longer."""
STACK_SIGNAL = signal.SIGUSR1
"""Signal that requests the stack. C code handles it, even while the interpreter is blocked."""


def main(serve: str, requests: int, replies: int, life: int, whereabouts: int) -> None:
    """Serve calls until the trainer closes the pipe.

    Args:
        serve: `module:function` of (setup, link): sends "ready" or "refused", then a reply to each call.
        requests: file descriptor of a pipe from the trainer: the setup, then calls.
        replies: descriptor of a pipe to the trainer.
        life: descriptor of a pipe that becomes readable when the trainer stops this process, or ends itself.
        whereabouts: descriptor of a pipe to the trainer for the stack, written on `STACK_SIGNAL`.
    """
    _fork_from_supervisor(life, (requests, replies, whereabouts))
    for descriptor in (requests, replies, whereabouts):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()  # a segmentation fault says in which line
    faulthandler.register(STACK_SIGNAL, file=whereabouts, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the trainer may have none
            stream.reconfigure(line_buffering=True)  # output before a hang is visible
    link = Link(requests, replies)
    setup = link.receive()
    if setup is None:
        return
    module, _, function = serve.partition(":")
    getattr(importlib.import_module(module), function)(setup, link)


def _fork_from_supervisor(life: int, others: tuple[int, ...]) -> None:
    """Fork and return in the worker; the parent supervises it and does not return."""
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        os.close(life)
        return
    for descriptor in (0, 1, 2, *others):  # the trainer must see its pipes close when the worker exits
        os.close(descriptor)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(STACK_SIGNAL, lambda *_: os.kill(worker, STACK_SIGNAL))
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(woken, select.POLLIN)
    # the first reap finds a worker that ended before the handler was installed
    while (status := reap().get(worker)) is None and life not in dict(poll.poll()):
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)
    end_descendants(END_SECONDS)
    _end_as(status or 0)


def _end_as(status: int) -> NoReturn:
    """End this process with the wait status of another one."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


class Link:
    """The pipes to and from the trainer."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        """File descriptor of the pipe from the trainer."""
        self._replies, self._owner = replies, os.getpid()

    def receive(self) -> Any:
        """Return the trainer's next message; None at the end of the pipe."""
        header = self._read(HEADER)
        return pickle.loads(self._read(int.from_bytes(header, "big"))) if header else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; one that cannot be sent is replaced by the reason."""
        if os.getpid() != self._owner:
            os._exit(0)  # a process that the function forked and that returned from it: it must not send the result
        try:
            body = encode_reply(message)
        except Exception as error:  # the repr of a user's class may raise anything
            body = encode_reply({"number": message["number"], **describe_raised(error)})
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        view = memoryview(frame_message(body))
        while view:
            view = view[os.write(self._replies, view) :]

    def _read(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            chunk = os.read(self.requests, min(size - len(chunks), 1 << 20))
            if not chunk:
                return b""
            chunks += chunk
        return bytes(chunks)


def describe_raised(error: BaseException) -> dict[str, Any]:
    """Return the part of a reply for a call that raised."""
    if isinstance(error, ConfigError):
        return {"refused": str(error)}
    return {"raised": [type(error).__name__, error_text(error), source_line(error)]}
