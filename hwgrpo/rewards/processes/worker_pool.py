"""The processes of one reward function: calls are handed out, overrunning ones are killed, dead ones are replaced."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.failures import Overran, ProcessDied, Raised
from hwgrpo.rewards.functions import Failed, Signature
from hwgrpo.rewards.processes.worker_handle import LEAVE_SECONDS, START_SECONDS, Child, arrived
from hwgrpo.rewards.randomness import Seed

GRACE_SECONDS = 1.0
"""What async calls get above their timeout: they are stopped by their own process, unless that hangs."""
LOOK_SECONDS = 0.2
"""How often it is looked whether a process is alive while nothing arrives."""

Answer = Mapping[str, Any] | Exception
"""What a call gave: the process's message with its `value` and `extras`, or what went wrong."""


class Pool:
    """Processes that serve one reward function.

    Args:
        setup: what they load: reward, name, kwargs, context, key.
        size: how many there are; the first is started now, the others when there is work for them.
        timeout: seconds for a call; None is no limit.

    Raises:
        ConfigError: the function cannot be found or called, or its file does not load.
    """

    def __init__(self, setup: Mapping[str, Any], size: int, timeout: float | None) -> None:
        self._setup, self._size, self._timeout = setup, size, timeout
        self._children: list[Child] = [Child(setup)]
        # also at the end of the interpreter; a forked copy of the trainer must leave them alone
        self._closing = weakref.finalize(self, _end, self._children, os.getpid())
        self._warm = 1
        try:
            self.signature = self._first_ready()
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Mapping[str, Any]], size: int, failed: Failed | None, seed: Seed) -> list[Answer]:
        """Make calls.

        Args:
            calls: the arguments of each.
            size: responses that a call is about.
            failed: is told of each failure at once; what it raises ends the other calls.
            seed: what the random numbers that a call draws depend on, together with its number.

        Returns:
            What each call gave, in their order.

        Raises:
            ConfigError: a call says that a setting is wrong.
            RewardError: a process that died or was killed cannot be replaced.
        """
        assert self._closing.alive, "the processes are closed"
        answers: dict[int, Answer] = {}

        def file(number: int, answer: Answer) -> None:
            answers[number] = answer
            if failed is not None and isinstance(answer, Exception):
                failed(number, answer)

        waiting = deque(self._shares(calls))
        try:
            while len(answers) < len(calls):
                busy = sum(bool(child.calls) for child in self._children)
                self._warm = max(self._warm, min(self._size, len(waiting) + busy))
                self._keep_alive()
                for child in self._children:
                    if waiting and child.idle:
                        self._give(child, waiting.popleft(), calls, size, seed)
                # What is late is read once more: the trainer itself may have been stopped for a while.
                now_able = self._wait()
                late = [child for child in self._children if child.deadline < time.monotonic()]
                for child in dict.fromkeys([*now_able, *late]):
                    ended = self._receive(child, file)
                    if ended is not None:
                        waiting.extendleft(self._ended(child, ended, file))
                    elif child.deadline < time.monotonic():
                        waiting.extendleft(self._overran(child, file))
        finally:  # a call that nobody waits for any more would answer in the midst of the next batch
            for child in [each for each in self._children if each.calls]:
                self._drop(child)
        self._keep_alive()  # they are ready when the next batch is
        return [answers[number] for number in range(len(calls))]

    def close(self) -> None:
        """End the processes."""
        self._closing()

    def _shares(self, calls: Sequence[Any]) -> list[list[int]]:
        """Return the numbers of the calls that a process gets at a time."""
        if not self._together:
            return [[number] for number in range(len(calls))]
        each = math.ceil(len(calls) / self._size)
        return [list(range(len(calls)))[start : start + each] for start in range(0, len(calls), each)]

    @property
    def _together(self) -> bool:
        return self.signature.is_async and self.signature.form == "verl"

    def _give(self, child: Child, numbers: Sequence[int], calls: Sequence[Any], size: int, seed: Seed) -> None:
        try:
            child.give({number: calls[number] for number in numbers}, size, self._timeout, self._deadline(), seed)
        except Exception as error:  # pickling runs the code of whatever the data holds
            raise RewardError(
                f"reward {self._setup['name']}: what it is called with cannot be sent to its process: {error!r}; "
                f"leave its timeout and workers out, so that it is called in the trainer"
            ) from error

    def _deadline(self) -> float:
        if self._timeout is None:
            return math.inf
        return time.monotonic() + self._timeout + (GRACE_SECONDS if self._together else 0.0)

    def _wait(self) -> list[Child]:
        """Send what is to be sent; return the children of which something may be received."""
        writable = [each.writable for each in self._children if each.writable is not None]
        nearest = min((each.deadline for each in self._children), default=math.inf)
        seconds = min(nearest - time.monotonic(), LOOK_SECONDS)
        able = arrived(seconds, *(each.readable for each in self._children), writable=writable)
        for child in self._children:
            if child.writable in able:
                child.flush()
        return [each for each in self._children if each.readable in able or not each.alive]

    def _receive(self, child: Child, file: Any) -> str | None:
        """File the answers that have arrived; return how the process ended, if it did."""
        try:
            for message in child.receive():
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                if not child.ready and "ready" in message:
                    child.ready, child.deadline = True, math.inf
                elif (number := message.get("number")) in child.calls:
                    del child.calls[number]
                    child.stopped_a_call |= "overran" in message
                    child.deadline = self._deadline() if child.calls else math.inf
                    file(number, self._answer(message))
                else:
                    return "sent an invalid reply"
        except EOFError as end:
            return str(end)
        return None

    def _answer(self, message: Mapping[str, Any]) -> Answer:
        if "overran" in message:
            return Overran(f"took longer than its timeout of {self._timeout:g} s and was stopped")
        if "raised" in message:
            return Raised(*map(str, message["raised"]))
        return message

    def _ended(self, child: Child, how: str, file: Any) -> list[list[int]]:
        """File what the end of a process means; return the calls to make again."""
        ready = child.ready
        self._drop(child)
        if not ready:
            raise RewardError(
                f"reward {self._setup['name']}: a new process {how} before it was ready, in the place of one that ended"
            )
        return self._blame(child, ProcessDied(f"lost its process, which {how}"), file)

    def _overran(self, child: Child, file: Any) -> list[list[int]]:
        """Kill a process whose time is over, and file that; return the calls to make again."""
        if not child.ready:
            return self._ended(child, f"did not load within {START_SECONDS:g} s", file)
        place = child.whereabouts()
        self._drop(child)
        return self._blame(
            child, Overran(f"took longer than its timeout of {self._timeout:g} s{place} and was stopped"), file
        )

    def _blame(self, child: Child, error: Exception, file: Any) -> list[list[int]]:
        """File an error of the call that a process was at; of several none is known to be it: each is made alone."""
        numbers = sorted(child.calls)
        child.calls = {}
        if len(numbers) == 1:
            file(numbers[0], error)
            return []
        return [[number] for number in reversed(numbers)]

    def _keep_alive(self) -> None:
        """Replace the processes that have ended, and start what there is work for."""
        for child in [each for each in self._children if each.idle]:
            if child.has_ended or (child.stopped_a_call and child.has_others):
                self._drop(child)
            child.stopped_a_call = False
        while len(self._children) < self._warm:
            self._children.append(Child(self._setup))

    def _drop(self, child: Child) -> None:
        self._children.remove(child)
        child.kill()

    def _first_ready(self) -> Signature:
        """Wait for the first process; return what it says of the function."""
        (child,) = self._children
        where = f"{self._setup['key']}.name={self._setup['reward']!r}"
        while child.deadline > time.monotonic():
            self._wait()
            try:
                for message in child.receive():
                    if "refused" in message:
                        raise ConfigError(str(message["refused"]))
                    child.ready, child.deadline = True, math.inf
                    said = message["ready"]
                    return Signature(
                        name=self._setup["name"],
                        form=said["form"],
                        parameters=frozenset(said["parameters"]),
                        required=frozenset(said["required"]),
                        open_ended=said["open_ended"],
                        given=frozenset(said["given"]),
                        is_async=said["is_async"],
                    )
            except EOFError as end:
                raise ConfigError(f"{where}: its process {end} while it ran the file") from None
        raise ConfigError(f"{where}: running the file{child.whereabouts()} took longer than {START_SECONDS:g} s")


def _end(children: list[Child], owner: int) -> None:
    """Let idle processes end by themselves, and kill what does not."""
    if os.getpid() != owner:
        return
    until = time.monotonic() + LEAVE_SECONDS
    for child in children:
        if child.idle:
            child.let_go()
    for child in children:
        if child.ready and not child.calls:
            child.wait(until - time.monotonic())
        child.kill()
    children.clear()
