"""The processes of one reward function: distribution of calls, timeouts, restarts."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.failures import ProcessDied, Raised, TimedOut
from hwgrpo.rewards.functions import Failed, Signature
from hwgrpo.rewards.processes.worker_handle import (
    POLL_SECONDS,
    START_SECONDS,
    Child,
    end_children,
    wait_for_pipes,
    wait_until_ready,
)
from hwgrpo.rewards.randomness import Seed

GRACE_SECONDS = 1.0
"""Seconds that async calls get above their timeout: their own process stops them, unless it hangs."""

Result = Mapping[str, Any] | Exception
"""Result of a call: the process's message with its `value` and `extras`, or an exception."""


class Pool:
    """Processes that serve one reward function.

    Args:
        setup: settings that they load: reward, name, kwargs, context, key.
        size: number of processes; the first is started now, the others on demand.
        timeout: seconds per call; None is no limit.

    Raises:
        ConfigError: the function cannot be found or called, or its file does not load.
    """

    def __init__(self, setup: Mapping[str, Any], size: int, timeout: float | None) -> None:
        self._setup, self._size, self._timeout = setup, size, timeout
        self._children: list[Child] = [_start(setup)]
        # also at interpreter exit; a fork of the trainer must not end them
        self._closing = weakref.finalize(self, end_children, self._children, os.getpid())
        self._warm = 1
        try:
            self.signature = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Mapping[str, Any]], size: int, failed: Failed | None, seed: Seed) -> list[Result]:
        """Make calls.

        Args:
            calls: the arguments of each.
            size: number of responses per call.
            failed: called on each failure at once; an exception that it raises ends the other calls.
            seed: seed of random numbers, together with the call's number.

        Returns:
            The result of each call, in order.

        Raises:
            ConfigError: a call reports a wrong setting.
            RewardError: a process that died or was killed cannot be replaced.
        """
        assert self._closing.alive, "the processes are closed"
        results: dict[int, Result] = {}

        def store(number: int, result: Result) -> None:
            results[number] = result
            if failed is not None and isinstance(result, Exception):
                failed(number, result)

        queued = deque(self._shares(calls))
        try:
            while len(results) < len(calls):
                busy = sum(bool(child.calls) for child in self._children)
                self._warm = max(self._warm, min(self._size, len(queued) + busy))
                self._keep_alive()
                for child in self._children:
                    if queued and child.idle:
                        self._give(child, queued.popleft(), calls, size, seed)
                # Late processes are read once more: the trainer itself may have been stopped for a while.
                now_able = self._wait()
                late = [child for child in self._children if child.deadline < time.monotonic()]
                for child in dict.fromkeys([*now_able, *late]):
                    ended = self._receive(child, store)
                    if ended is not None:
                        queued.extendleft(self._handle_exit(child, ended, store))
                    elif child.deadline < time.monotonic():
                        queued.extendleft(self._handle_timeout(child, store))
        finally:  # replies of abandoned calls would arrive during the next batch
            for child in [each for each in self._children if each.calls]:
                self._drop(child)
        self._keep_alive()  # they are ready when the next batch is
        return [results[number] for number in range(len(calls))]

    def close(self) -> None:
        """End the processes."""
        self._closing()

    def _shares(self, calls: Sequence[Any]) -> list[list[int]]:
        """Return the numbers of the calls in each share that one process gets at a time."""
        if not self._concurrent:
            return [[number] for number in range(len(calls))]
        each = math.ceil(len(calls) / self._size)
        return [list(range(len(calls)))[start : start + each] for start in range(0, len(calls), each)]

    @property
    def _concurrent(self) -> bool:
        return self.signature.is_async and self.signature.form == "verl"

    def _give(self, child: Child, numbers: Sequence[int], calls: Sequence[Any], size: int, seed: Seed) -> None:
        try:
            child.send_calls({number: calls[number] for number in numbers}, size, self._timeout, self._deadline(), seed)
        except Exception as error:  # pickling runs the code of whatever the data holds
            raise RewardError(
                f"reward {self._setup['name']}: its arguments cannot be sent to its process: {error!r}; "
                f"leave its timeout and workers out, so that it is called in the trainer"
            ) from error

    def _deadline(self) -> float:
        if self._timeout is None:
            return math.inf
        return time.monotonic() + self._timeout + (GRACE_SECONDS if self._concurrent else 0.0)

    def _wait(self) -> list[Child]:
        """Send pending requests; return the children with messages or an exit to process."""
        writable = [each.writable for each in self._children if each.writable is not None]
        nearest = min((each.deadline for each in self._children), default=math.inf)
        seconds = min(nearest - time.monotonic(), POLL_SECONDS)
        able = wait_for_pipes(seconds, *(each.readable for each in self._children), writable=writable)
        for child in self._children:
            if child.writable in able:
                child.flush()
        return [each for each in self._children if each.readable in able or not each.alive]

    def _receive(self, child: Child, store: Any) -> str | None:
        """File the results that have arrived; return how the process ended, if it did."""
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
                    store(number, self._read_result(message))
                else:
                    return "sent an invalid reply"
        except EOFError as end:
            return str(end)
        return None

    def _read_result(self, message: Mapping[str, Any]) -> Result:
        if "overran" in message:
            return TimedOut(f"took longer than its timeout of {self._timeout:g} s and was stopped")
        if "raised" in message:
            return Raised(*map(str, message["raised"]))
        return message

    def _handle_exit(self, child: Child, exit_text: str, store: Any) -> list[list[int]]:
        """Store the failure of a process that ended; return the calls to retry."""
        ready = child.ready
        self._drop(child)
        if not ready:
            raise RewardError(
                f"reward {self._setup['name']}: a new process {exit_text} before it was ready, "
                "as the replacement of one that ended"
            )
        return self._attribute(child, ProcessDied(f"lost its process, which {exit_text}"), store)

    def _handle_timeout(self, child: Child, store: Any) -> list[list[int]]:
        """Kill a process after a timeout and store the failure; return the calls to retry."""
        if not child.ready:
            return self._handle_exit(child, f"did not load within {START_SECONDS:g} s", store)
        place = child.whereabouts()
        self._drop(child)
        return self._attribute(
            child, TimedOut(f"took longer than its timeout of {self._timeout:g} s{place} and was stopped"), store
        )

    def _attribute(self, child: Child, error: Exception, store: Any) -> list[list[int]]:
        """Store the error of a process's only call; of several calls any may have failed: retry each alone."""
        numbers = sorted(child.calls)
        child.calls = {}
        if len(numbers) == 1:
            store(numbers[0], error)
            return []
        return [[number] for number in reversed(numbers)]

    def _keep_alive(self) -> None:
        """Replace the processes that have ended, and start those with work."""
        for child in [each for each in self._children if each.idle]:
            if child.has_ended or (child.stopped_a_call and child.has_others):
                self._drop(child)
            child.stopped_a_call = False
        while len(self._children) < self._warm:
            self._children.append(_start(self._setup))

    def _drop(self, child: Child) -> None:
        self._children.remove(child)
        child.kill()

    def _wait_until_ready(self) -> Signature:
        """Wait for the first process; return the function's signature."""
        (child,) = self._children
        ready = wait_until_ready(child, f"{self._setup['key']}.name={self._setup['reward']!r}")
        return Signature(
            name=self._setup["name"],
            form=ready["form"],
            parameters=frozenset(ready["parameters"]),
            required=frozenset(ready["required"]),
            open_ended=ready["open_ended"],
            given=frozenset(ready["given"]),
            is_async=ready["is_async"],
        )


def _start(setup: Mapping[str, Any]) -> Child:
    return Child(setup, f"hwgrpo reward {setup['reward']}", "hwgrpo.rewards.processes.reward_worker:serve")
