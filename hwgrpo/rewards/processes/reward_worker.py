"""The process in which a reward function runs when it has a timeout: it takes calls, and sends back what they gave.

It is a new interpreter, so it has no threads, locks or devices of the trainer's, and it imports the function's file
itself. Before that it forks: the copy becomes the worker, and the first process its supervisor. That one waits for the
end of the worker or of the trainer, however it comes about, kills every process below it, and ends as the worker did.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
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
from hwgrpo.rewards.async_functions import wait_for
from hwgrpo.rewards.functions import RewardFunction
from hwgrpo.rewards.processes.descendants import adopt_orphans, end_descendants, reap
from hwgrpo.rewards.processes.messages import HEADER, as_json, framed, pack_all, pack_one
from hwgrpo.rewards.randomness import TOGETHER, seeded
from hwgrpo.rewards.reward_loading import load_function
from hwgrpo.rewards.signatures import adapt
from hwgrpo.user_code import import_plugins, raised_by_user_code, source_line

END_SECONDS = 5.0
"""What the end of all processes may take; longer only takes one that waits for a disk."""
WHERE = signal.SIGUSR1
"""Asks for the line that the process is at. It is answered by C code, whatever holds the interpreter."""


def main(requests: int, replies: int, life: int, whereabouts: int) -> None:
    """Serve calls until the trainer closes the pipe.

    Args:
        requests: file descriptor of a pipe from the trainer: what to load, then calls.
        replies: of a pipe to the trainer.
        life: of a pipe that can be read when the trainer wants all this to end, or has ended itself.
        whereabouts: of a pipe to the trainer that takes the stack when it asks `WHERE`.
    """
    _fork_from_supervisor(life, (requests, replies, whereabouts))
    for descriptor in (requests, replies, whereabouts):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()  # a segmentation fault says in which line
    faulthandler.register(WHERE, file=whereabouts, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the trainer may have none
            stream.reconfigure(line_buffering=True)  # what it prints before it hangs is seen
    link = _Link(requests, replies)
    setup = link.take()
    if setup is None:
        return
    try:
        import_plugins(setup["plugins"])
        _, call = load_function(setup["reward"], f"{setup['key']}.name")
        function = adapt(setup["name"], call, setup["kwargs"], setup["context"], setup["key"])
        if function.form == "batch":
            import torch  # noqa: F401 - its arguments are tensors: not in the time of the first call
    except ConfigError as error:
        link.answer({"refused": str(error)})
        return
    link.answer({"ready": _description(function)})
    while (request := link.take()) is not None:
        if function.is_async and function.form == "verl":
            with seeded(*request["seed"], TOGETHER):
                asyncio.run(_serve_together(function, request, link))
        else:
            for number, arguments in request["calls"]:
                with seeded(*request["seed"], number):
                    answer = _serve(function, arguments, request["size"])
                link.answer({"number": number, **answer})


def _fork_from_supervisor(life: int, others: tuple[int, ...]) -> None:
    """Return in a new process, the worker; this one supervises it and does not return."""
    adopt_orphans()
    worker = os.fork()
    if worker == 0:
        os.close(life)
        return
    for descriptor in (0, 1, 2, *others):  # the trainer must see its pipes end with the process that answers
        os.close(descriptor)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(WHERE, lambda *_: os.kill(worker, WHERE))
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(woken, select.POLLIN)
    # a worker that ended before this process could be woken is found without
    while (status := reap().get(worker)) is None and life not in dict(poll.poll()):
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)
    end_descendants(END_SECONDS)
    _end_as(status or 0)


def _end_as(status: int) -> NoReturn:
    """End this process as another one ended, whose wait status is given."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # what SIGKILL does cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


class _Link:
    """The pipes to and from the trainer."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies, self._owner = requests, replies, os.getpid()

    def take(self) -> Any:
        """Return the next thing the trainer says; None when it says no more."""
        header = self._read(HEADER)
        return pickle.loads(self._read(int.from_bytes(header, "big"))) if header else None

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send a message; one that cannot be sent is replaced by the reason."""
        if os.getpid() != self._owner:
            os._exit(0)  # a copy that the function forked and that came back from it: this is not its answer
        try:
            body = as_json(message)
        except Exception as error:  # a class of the user's that is turned into text may raise anything
            body = as_json({"number": message["number"], **_error(error)})
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        view = memoryview(framed(body))
        while view:
            view = view[os.write(self._replies, view) :]

    def _read(self, size: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < size:
            piece = os.read(self._requests, min(size - len(pieces), 1 << 20))
            if not piece:
                return b""
            pieces += piece
        return bytes(pieces)


def _serve(function: RewardFunction, arguments: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Make one call; return its part of the answer."""
    extras: list[dict[str, Any]] = [{} for _ in range(size)]
    try:
        value = wait_for(function.start(arguments, extras))
        packed = pack_one(value) if function.form == "verl" else pack_all(value)
    except BaseException as error:
        if not raised_by_user_code(error):
            raise
        return _error(error)
    return {"value": packed, "extras": extras} if any(extras) else {"value": packed}


async def _serve_together(function: RewardFunction, request: Mapping[str, Any], link: _Link) -> None:
    """Make the calls of an async function at the same time, and answer each when it is done."""

    async def serve(number: int, arguments: Mapping[str, Any]) -> None:
        limit = asyncio.timeout(request["timeout"])
        try:
            async with limit:
                answer: dict[str, Any] = {"value": pack_one(await function.start(arguments, []))}
        except BaseException as error:
            if not raised_by_user_code(error):
                raise
            answer = {"overran": True} if limit.expired() and isinstance(error, TimeoutError) else _error(error)
        link.answer({"number": number, **answer})

    await asyncio.gather(*(serve(number, arguments) for number, arguments in request["calls"]))


def _error(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ConfigError):
        return {"refused": str(error)}
    return {"raised": [type(error).__name__, error_text(error), source_line(error)]}


def _description(function: RewardFunction) -> dict[str, Any]:
    return {
        "form": function.form,
        "parameters": sorted(function.parameters),
        "required": sorted(function.required),
        "open_ended": function.open_ended,
        "given": sorted(function.given),
        "is_async": function.is_async,
    }
