"""The server engine's session: requests that come in turns, sent to the servers as they come."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.requests import Request, Sample, make_requests
from hwgrpo.rollout.server.http_client import Cancellation
from hwgrpo.values import Completions, PromptBatch, Sampling


class SendRequest(Protocol):
    """Returns the samples of a request, in a thread of the session; None where both dispatches missed the deadline."""

    def __call__(
        self, number: int, request: Request, deadlines: GroupDeadlines, cancellation: Cancellation
    ) -> list[Sample] | None: ...


@dataclass
class _Sent:
    """A request that has been submitted."""

    sampling: Sampling
    future: Future[list[Sample] | None]
    cancellation: Cancellation


class ServerSession:
    """Requests of one `generate`, with or without workflows; see `Session` for the methods.

    A server keeps keys and values of earlier turns by its own prefix cache: nothing is kept or released here.

    Args:
        send: sends a request; it is called in threads.
        deadlines: of no groups yet; requests are its groups.
        threads: most requests in flight.
        check: raises ConfigError or DataError where prompts or settings do not fit the model.
        make: makes the completions of samples and their settings.
        closed: called with perf/rollout_tokens_per_second at the end: response tokens per second in which a request was
            in flight.
    """

    def __init__(
        self,
        send: SendRequest,
        deadlines: GroupDeadlines,
        *,
        threads: int,
        check: Callable[[PromptBatch, Sequence[Sampling]], None],
        make: Callable[[Sequence[Sequence[Sample] | None], Sequence[Sampling]], Completions],
        closed: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._send, self._deadlines = send, deadlines
        self._check, self._make, self._closed = check, make, closed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hwgrpo-rollout-request")
        self._sent: list[_Sent] = []
        self._running: set[int] = set()
        """Numbers of requests that have not ended, as far as `advance` has seen."""
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of requests whose threads have ended, of cancelled ones, too."""
        self._on_end: Callable[[], object] | None = None
        self._tokens, self._seconds, self._since = 0, 0.0, 0.0
        self._stack = ExitStack()
        self._stack.enter_context(deadlines.reported())

    @property
    def busy(self) -> bool:
        """Whether a submitted request has not ended."""
        return bool(self._running)

    def notify(self, on_end: Callable[[], object]) -> None:
        """Call a function whenever a request has ended, in its thread; `advance` waits for none any more."""
        self._on_end = on_end

    def submit(self, requests: Sequence[TurnRequest]) -> list[int]:
        """Send requests, or queue them while as many as may be are in flight; return the number of each.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
        """
        batch, samplings = PromptBatch(tuple(each.prompt for each in requests)), [each.sampling for each in requests]
        self._check(batch, samplings)
        if not self._running:
            self._since = time.perf_counter()
        first = len(self._sent)
        self._deadlines.expect(len(requests))
        for number, request in enumerate(make_requests(batch, samplings), first):
            cancellation = Cancellation()
            future = self._pool.submit(self._send, number, request, self._deadlines, cancellation)
            self._sent.append(_Sent(request.sampling, future, cancellation))
            self._running.add(number)
            future.add_done_callback(lambda _, number=number: self._end(number))
        return list(range(first, len(self._sent)))

    def advance(self) -> list[int]:
        """Wait for the end of a request, without `notify`; return those that have ended, or were dropped as too late.

        Raises:
            RunError: no server is left and none recovers, or the same request keeps failing.
            Stopped: another thread has closed the engine, or stopped the gate.
        """
        ended: list[int] = []
        while (self._on_end is None and self.busy and not ended) or not self._ended.empty():
            number = self._ended.get()
            if number in self._running:  # else it was cancelled
                self._sent[number].future.result(0)  # raises what its thread has raised
                ended.append(number)
        self._finish(ended)
        return ended

    def take(self, numbers: Sequence[int]) -> Completions:
        """Return the responses to requests that have ended, ordered by request, then by sample."""
        sent = [self._sent[number] for number in numbers]
        completions = self._make([each.future.result(0) for each in sent], [each.sampling for each in sent])
        for each in sent:
            each.future = Future()  # its samples are not kept until the end
        completions = self._deadlines.apply(completions, numbers)
        self._tokens += len(completions.tokens)
        return completions

    def release(self, responses: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the servers drop what they keep of earlier turns by themselves."""

    def cancel(self, numbers: Sequence[int]) -> None:
        """End requests that have not ended; their responses are lost."""
        for number in numbers:
            sent = self._sent[number]
            sent.future.cancel()
            sent.cancellation.cancel()
            self._deadlines.finish(number)
        self._finish(numbers)

    def close(self) -> None:
        """End all requests, and report the metrics."""
        self.cancel([*self._running])
        self._pool.shutdown()
        self._stack.close()
        self._closed({"perf/rollout_tokens_per_second": self._tokens / max(self._seconds, 1e-9)})

    def _end(self, number: int) -> None:
        """Record, in the thread of a request, that it has ended."""
        self._ended.put(number)
        if self._on_end is not None:
            self._on_end()

    def _finish(self, numbers: Sequence[int]) -> None:
        """Record that requests run no longer; the clock stops with the last one."""
        if self._running and self._running.issubset(numbers):
            self._seconds += time.perf_counter() - self._since
        self._running.difference_update(numbers)
