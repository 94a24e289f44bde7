"""One rollout server as a rank sees it, and its repair.

A server that dies, times out or sends invalid responses takes no requests until it has been restarted, if the run
started it, or has come back, and has the current weights again. A thread sees to that.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence

from hwgrpo.config.schema import RolloutServerConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.server.engine_state import EngineState
from hwgrpo.rollout.server.http_client import InvalidResponse, ServerInUse, ServerProblem
from hwgrpo.rollout.server.server_api import ScoreRequest, ServerApi
from hwgrpo.rollout.server.server_connection import HEALTH_TIMEOUT, ServerConnection, disconnect_server
from hwgrpo.rollout.server.server_owner import Owner, check_owner
from hwgrpo.rollout.server.weight_transfer import WeightTransfer
from hwgrpo.support.text import hide_secrets, terminal_line
from hwgrpo.support.waits import Wait
from hwgrpo.values import PromptImages

PAUSE = 0.5
HEARTBEAT = 2.0
"""Seconds between requests that keep this run's claim on the server."""
CLOSE_TIMEOUT = 60.0
"""Seconds that `close` waits for the end of a repair."""


class RolloutServer:
    """One server: whether it takes requests, and its repair in a thread of its own where it does not.

    Args:
        connection: the connection to it.
        api: the kind of server.
        owner: this run, as the owner of its weights.
        transfer: sends it weights; None: rank 0 does.
        settings: `rollout.server`.
        state: what it must have.
        alone: whether there is no other server: nothing is printed of it, and it is not waited for longer than
            `start_timeout`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        api: ServerApi,
        owner: Owner,
        transfer: WeightTransfer | None,
        settings: RolloutServerConfig,
        state: EngineState,
        *,
        alone: bool,
    ) -> None:
        self.client, self.model, self.base_model = connection.client, connection.model, connection.base_model
        self.connection, self.alone = connection, alone
        self._api, self._owner, self._transfer = api, owner, transfer
        self._settings, self._state = settings, state
        self.url = hide_secrets(self.client.url)
        self.ready = False
        """Whether it has the current weights and takes requests."""
        self.in_flight = self.restarts = 0
        self.failure: RunError | None = None
        """Why it is not waited for any longer."""
        self._has_loaded = False
        """Whether it has had weights of this run."""
        self._announced: set[str] = set()
        """What has been printed of its state since it last took requests."""
        self._repair_thread: threading.Thread | None = None
        self._in_pass = threading.Lock()
        """Held while the repair thread uses the server."""

    @property
    def repairing(self) -> bool:
        """Whether a thread waits for it."""
        return self._repair_thread is not None

    def load_weights(self) -> None:
        """Have it load the prepared weights, and let it take requests; it is lost if it does not load them.

        Raises:
            DamagedWeights: they have changed where they are kept.
        """
        assert self._transfer is not None
        try:
            self._transfer.send(self.client)
        except ServerProblem as problem:
            if self.alone and not self._settings.retries:
                raise RunError(
                    f"the rollout server did not apply weights {self._state.version}: {problem}"
                ) from problem
            self.lose(f"it did not apply weights: {problem}")
        else:
            self._take_requests(self._state.version)

    def lose(self, problem: str) -> None:
        """Give it no more requests, and have a thread repair it."""
        with self._state.changed:
            if self._repair_thread is not None or self._state.is_over:
                return
            self.ready, self.failure = False, None
            self._repair_thread = threading.Thread(target=self._recover, args=(problem,), daemon=True)
            self._repair_thread.start()

    def accept(self) -> bool:
        """Let it take requests if it is healthy and has the current weights; return whether it does."""
        version = self._state.version
        return self.has_current_weights() and self._take_requests(version)

    def has_current_weights(self, seconds: float = 2 * HEALTH_TIMEOUT) -> bool:
        """Return whether it is healthy and has the current weights.

        Args:
            seconds: limit on the time of both requests together.

        Raises:
            ServerInUse: it has those of another run.
        """
        end = time.monotonic() + seconds
        try:
            self.client.request("GET", "/health", timeout=min(HEALTH_TIMEOUT, seconds))
        except ServerProblem:
            return False
        left = end - time.monotonic()
        return left > 0 and self.served_label(left) == self._owner.label(self._state.version)

    def served_label(self, seconds: float = HEALTH_TIMEOUT) -> str | None:
        """Return the label of its weights; None where it does not respond in time, HEALTH_TIMEOUT at most.

        Raises:
            ServerInUse: it had weights of this run, and now has those of another one.
        """
        try:
            label = self._api.version(self.client, min(HEALTH_TIMEOUT, seconds))
        except ServerProblem:
            return None
        if self._has_loaded:
            check_owner(label, self._owner)
        return label

    def check_label(self, label: str | None) -> None:
        """Check that a response was made with the current weights.

        Raises:
            InvalidResponse: with others of this run, or none.
            ServerInUse: with those of another run.
        """
        wanted = self._owner.label(self._state.version)
        if label != wanted:
            check_owner(label, self._owner)
            raise InvalidResponse(f"the response was sampled with weights {label}, not {wanted}")

    def score(
        self, sequences: Sequence[Sequence[int]], *, adapter: bool = True, images: PromptImages | None = None
    ) -> list[list[float]] | None:
        """Return log-probs as `ServerEngine.score`, of this server alone; None also where it takes no requests."""
        scores = []
        for tokens in sequences:
            if self._transfer is None or not self._api.can_score or not self.ready:
                return None
            try:
                result, label = self.request_scores(ScoreRequest(tokens, images), adapter=adapter)
                self.check_label(label)
            except ServerProblem as problem:
                self.lose(str(problem))
                return None
            scores.append(result)
        return scores

    def request_scores(self, request: ScoreRequest, *, adapter: bool) -> tuple[list[float], str | None]:
        """Return the log-probs of a sequence's tokens after the first, and the label of the weights."""
        model = self.model if adapter else self.base_model
        return self._api.score(self.client, model, self._state.version, request, self._settings.request_timeout)

    def sleep(self, level: int) -> None:
        """Have it free its weights and cache, until it gets new weights.

        Raises:
            RunError: it does not, and there is no other one.
        """
        with self._in_pass:  # a pass of the repair that has begun ends first, and the next one waits for new weights
            process, problem = self.connection.process, None
            for attempt in range(self._settings.retries + 1):
                if attempt:
                    time.sleep(PAUSE)
                try:
                    timeout = HEALTH_TIMEOUT if self.repairing else self._settings.request_timeout
                    self._api.sleep(self.client, level, self._owner, timeout)
                    return
                except ServerProblem as error:
                    problem = error
                if self.repairing and process is not None:
                    process.stop()
                if self.repairing or (process is not None and not process.alive):
                    return  # it is dead, its memory is free, and new weights start it again
        if self.alone:
            raise RunError(f"the rollout server did not free its memory: {problem}") from problem
        self.lose(f"it did not free its memory: {problem}")

    def keep_claim(self, shared: bool) -> None:
        """Keep this run's claim on it until the engine is closed.

        Args:
            shared: whether other ranks, which cannot repair it, may be the only ones that notice a loss: it is repaired
                then. A slow server is left alone: the threads that wait for it notice a timeout.
        """
        while not self._state.closed.wait(HEARTBEAT):
            try:
                label = self.served_label()
            except ServerInUse:
                return  # the next request raises it
            process = self.connection.process
            died = process is not None and not process.alive
            with self._state.changed:
                stale = label not in (None, self._owner.label(self._state.version))
                if shared and self.ready and self._state.usable and (died or stale):
                    self.lose("it died, or lost its weights")

    def close(self) -> None:
        """End its repair, and its process if the run started it; else release it."""
        process, thread = self.connection.process, self._repair_thread
        self.client.abort_requests()  # threads that wait for a response stop waiting
        if thread is not None:
            if process is not None:
                process.stop()  # also aborts requests of the thread
            thread.join(CLOSE_TIMEOUT)
        if self._transfer is not None:
            disconnect_server(self.connection, self._api, self._owner)
            self._transfer = None

    def _take_requests(self, version: int) -> bool:
        """Let it take requests, with weights `version`, unless newer ones are due or it is to sleep."""
        self._has_loaded = True
        with self._state.changed:
            if version != self._state.version or not self._state.usable:
                return False
            self.ready, self.failure, self._repair_thread = True, None, None
            self._state.changed.notify_all()
        if self._announced:
            self._announce("back", f"the rollout server at {self.url} takes requests again, with weights {version}")
            self._announced.clear()
        return True

    def _recover(self, problem: str) -> None:
        """Repair it until it takes requests or the engine is closed, and record where that fails."""
        try:
            self._wait_until_ready(problem)
        except RunError as error:
            self._fail(error)
        except Exception as error:
            self._fail(RunError(f"the rollout server at {self.url} could not be repaired: {error!r}"))
            raise  # its stack is printed
        finally:
            with self._state.changed:
                if self._repair_thread is threading.current_thread():
                    self._repair_thread = None
                self._state.changed.notify_all()

    def _wait_until_ready(self, problem: str) -> None:
        """Repair it in passes.

        Raises:
            RunError: it cannot be started again or, where it is the only one, did not recover in time.
        """
        what, seconds = f"the rollout server at {self.url}, after {problem}", self._settings.start_timeout
        wait = None
        while not self._state.is_over:
            if not self._state.usable:  # it sleeps, or would have to when it is back
                wait = None
                self._state.closed.wait(PAUSE)
                continue
            wait = wait or Wait(what, seconds)
            with self._in_pass:
                if self.accept():
                    return
                self._leave_to_others(problem)
                if wait.over:
                    error = RunError(
                        f"the rollout server at {self.url} did not recover within rollout.server."
                        f"start_timeout={seconds:g} s; the first error: {problem}"
                    )
                    if self.alone:
                        raise error
                    self._fail(error)
                    wait = Wait(what, math.inf, first_report=math.inf)
                self._repair(wait)

    def _repair(self, wait: Wait) -> None:
        """Restart it or send its weights again, where this rank can, or wait a moment."""
        process = self.connection.process
        try:
            self.client.request("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            if process is None:
                wait.pause(PAUSE)
                return
            self.restarts += 1
            try:
                process.start()
                seconds = min(wait.left, self._settings.start_timeout)
                process.wait_until_healthy(self.client, seconds, lambda: not self._is_needed)
            except ConfigError as error:  # it started with these settings before
                raise RunError(f"the rollout server cannot be started again: {error}") from error
        if not self._is_needed:  # the request was aborted for that reason
            return
        try:
            if self._transfer is not None:
                self._transfer.send(self.client)
            else:
                wait.pause(PAUSE)  # rank 0 will
        except ServerProblem:
            wait.pause(PAUSE)

    @property
    def _is_needed(self) -> bool:
        return self._state.usable and not self._state.is_over

    def _leave_to_others(self, problem: str) -> None:
        """Abort its requests, which other servers answer, and print that once."""
        if not self.alone and "lost" not in self._announced:
            self.client.abort_requests()
            self._announce("lost", f"the rollout server at {self.url} is lost, and others take its requests: {problem}")

    def _fail(self, error: RunError) -> None:
        """Record why it is not waited for any longer."""
        with self._state.changed:
            if isinstance(error, ServerInUse):
                self._state.failure = self._state.failure or error
            self.failure = error
            self._state.changed.notify_all()
        self.client.abort_requests()
        if not (self.alone or isinstance(error, ServerInUse)):
            self._announce("failed", f"the run goes on without the rollout server at {self.url}: {error}")

    def _announce(self, event: str, text: str) -> None:
        """Print a line, on rank 0 and once for each event until it takes requests again."""
        if self._transfer is not None and event not in self._announced:
            print(terminal_line(f"hwgrpo: {text}"), file=sys.stderr, flush=True)
        self._announced.add(event)
