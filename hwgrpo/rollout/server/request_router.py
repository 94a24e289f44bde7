"""Spreading of requests over the servers that take some, and what follows where one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hwgrpo.errors import RunError
from hwgrpo.rollout.pause_gate import Stopped
from hwgrpo.rollout.server.engine_state import EngineState
from hwgrpo.rollout.server.http_client import Cancellation, InvalidResponse, ServerInUse, ServerProblem, TimedOut
from hwgrpo.rollout.server.rollout_server import PAUSE, RolloutServer

T = TypeVar("T")

LEAST_CHECK = 3.0
"""Seconds that a busy server has at least to show that it is healthy."""
NOT_JSON = "Out of range float values are not JSON compliant"
"""Error of a server whose log-probs are not numbers."""
NOT_FINITE = ". Log-probs are not finite: weights contain NaN or infinite values, or a dtype overflows (rollout.dtype)"


class RequestRouter:
    """Sends each request to the server with the fewest in flight, and once more elsewhere where it fails.

    Args:
        servers: all servers.
        state: what they must have.
        retries: `rollout.server.retries`.
        rank: this rank, so that not all ranks begin with the same server.
    """

    def __init__(self, servers: Sequence[RolloutServer], state: EngineState, retries: int, rank: int) -> None:
        self._servers, self._state, self._most_retries = servers, state, retries
        self._turn = rank
        """Number of the next request: among servers with as many in flight, it says which one is next."""
        self.retries = 0
        """Requests sent again since the start."""

    def request(
        self,
        send: Callable[[RolloutServer], tuple[T, str | None]],
        problem_of: Callable[[T], str | None],
        failed: list[RolloutServer],
        *,
        group_timeout: float | None = None,
        cancellation: Cancellation | None = None,
    ) -> T:
        """Return the result of a request that the current weights have answered; a server where it fails is lost.

        Args:
            send: sends it to a server; returns its result and the label of the weights.
            problem_of: returns why a result is invalid, or None.
            failed: servers where it has failed; extended.
            group_timeout: seconds in which a server must answer, and then, in LEAST_CHECK or more, show that it is
                healthy: one that only does the latter is not lost, and TimedOut is raised. None: it is lost.
            cancellation: that `send` sends with; Stopped is raised once it is requested.
        """
        for attempt in range(self._most_retries + 1):
            with self.next_server(failed, cancellation) as server:
                try:
                    result, label = send(server)
                    server.check_label(label)
                    invalid = problem_of(result)
                    if invalid is not None:
                        raise InvalidResponse(invalid)
                    return result
                except ServerInUse as in_use:
                    self.fail(in_use)
                    raise
                except ServerProblem as error:
                    problem = error
            failed.append(server)
            if self._is_over(cancellation):
                raise Stopped
            self._state.check_failure()
            late = group_timeout is not None and isinstance(problem, TimedOut)
            if late and self._is_healthy(server, max(group_timeout or 0.0, LEAST_CHECK)):
                raise problem
            if attempt == self._most_retries:
                urls = dict.fromkeys(server.url for server in failed)
                failure = RunError(
                    f"the rollout server{'s' * (len(urls) > 1)} at {', '.join(urls)} failed {attempt + 1} times in a "
                    f"row (rollout.server.retries={attempt}); the last error: {problem}"
                    f"{NOT_FINITE if NOT_JSON in str(problem) else ''}"
                )
                self.fail(failure)
                raise failure from problem
            self.retries += 1
            server.lose(str(problem))
        raise AssertionError("the loop returns or raises")

    def _is_healthy(self, server: RolloutServer, seconds: float) -> bool:
        """Return whether a server is healthy and has the current weights, within some seconds.

        All requests are aborted where it has another run's.
        """
        try:
            return server.has_current_weights(seconds)
        except ServerInUse as in_use:
            self.fail(in_use)
            raise

    @contextmanager
    def next_server(
        self, failed: Sequence[RolloutServer], cancellation: Cancellation | None = None
    ) -> Iterator[RolloutServer]:
        """Wait for a server that takes requests, and count one as in flight there during the block.

        Of several it is the one with the fewest in flight, and not the last of `failed`.
        """
        with self._state.changed:
            ready = self.ready_servers(cancellation)
            others = [server for server in ready if server not in failed[-1:]] or ready
            first = self._turn % len(others)
            server = min(others[first:] + others[:first], key=lambda server: server.in_flight)
            self._turn += 1
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._state.changed:
                server.in_flight -= 1

    def ready_servers(self, cancellation: Cancellation | None = None) -> list[RolloutServer]:
        """Wait until servers take requests, and return them.

        Raises:
            RunError: none is left, or requests fail for another reason.
            Stopped: the engine is closed, the thread that generates is to end, or the request is cancelled.
        """
        with self._state.changed:
            while True:
                if self._is_over(cancellation):
                    raise Stopped
                self._state.check_failure()
                ready = [server for server in self._servers if server.ready]
                if ready:
                    return ready
                failures = [server.failure for server in self._servers if server.failure is not None]
                if len(failures) == len(self._servers):
                    none_left = "no rollout server is left: " if len(failures) > 1 else ""
                    raise RunError(none_left + "; ".join(map(str, failures))) from failures[0]
                self._state.changed.wait(PAUSE)

    def _is_over(self, cancellation: Cancellation | None) -> bool:
        return self._state.is_over or (cancellation is not None and cancellation.requested)

    def try_again(self) -> None:
        """Forget failures of earlier requests."""
        self._state.failure = None
        for server in self._servers:
            if not (server.ready or server.repairing):
                server.lose(str(server.failure))

    def fail(self, error: RunError) -> None:
        """Record that no request can succeed, and abort all."""
        with self._state.changed:
            self._state.failure = self._state.failure or error
            self._state.changed.notify_all()
        self.abort_requests()

    def abort_requests(self) -> None:
        """Abort all requests in flight."""
        for server in self._servers:
            server.client.abort_requests()
