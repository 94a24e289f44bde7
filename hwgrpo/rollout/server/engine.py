"""Sampling by a server that all ranks share, over HTTP; `ServerApi` implements the kind of server.

A server that dies, times out or sends invalid responses is restarted if the run started it, else waited for; it gets
the current weights again and the request is retried.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TypeVar

from torch import distributed as dist

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.pause_gate import Stopped
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Request, Sample, check_batch, find_problem, make_completions, make_requests
from hwgrpo.rollout.server.http_client import InvalidResponse, ServerInUse, ServerProblem, TimedOut
from hwgrpo.rollout.server.server_api import ServerApi, ServerRequest
from hwgrpo.rollout.server.server_connection import HEALTH_TIMEOUT, connect_server
from hwgrpo.rollout.server.server_owner import check_owner
from hwgrpo.rollout.shared_devices import sleeps
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.vllm.vllm_settings import sleep_level
from hwgrpo.values import Completions, PromptBatch, Sampling
from hwgrpo.waits import Wait

T = TypeVar("T")

THREADS = 64
"""Requests that a rank has in flight at a time."""
PAUSE = 0.5
HEARTBEAT = 2.0
"""Seconds between requests that keep this run's claim on the server."""
CLOSE_TIMEOUT = 60.0
"""Seconds that `close` waits for another thread to stop waiting for the server."""
NOT_JSON = "Out of range float values are not JSON compliant"
"""Error of a server whose log-probs are not numbers."""
NOT_FINITE = ". Log-probs are not finite: weights contain NaN or infinite values, or a dtype overflows (rollout.dtype)"


class ServerEngine:
    """Engine that samples by a server of all ranks; rank 0 starts it, sends weights and recovers it.

    Args:
        parts: the factory's inputs.
        api: the kind of server.

    Raises:
        ConfigError: the server does not start, is of another kind or in use by another run, or the token is missing or
            rejected.
        RunError: weights cannot be sent.
    """

    def __init__(self, parts: EngineParts, api: ServerApi) -> None:
        self._parts, self._api = parts, api
        self._settings = parts.config.rollout.server
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._version = 0
        self._usable = True
        self._recovering = threading.RLock()
        self._failure: RunError | None = None
        """Why the server cannot be used, once known: other waiting threads stop."""
        self._has_sent = False
        """Whether the server has received weights of this run."""
        self._closed = threading.Event()
        self._restarts = self._retries = 0
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens), and since the start
        rollout/server_retries (requests sent again) and rollout/server_restarts."""
        adapter = parts.weights.adapter()
        self._sleep_level = sleep_level(parts.config, adapter is not None)
        parts.device.empty_cache()  # a server on this device allocates from it, not from torch's cache
        if self._ranks > 1:
            dist.barrier()
        self._server = connect_server(parts, api, adapter)
        self._client, self._transfer, self._owner = self._server.client, self._server.transfer, self._server.owner
        try:
            self._send_weights(0, adapter)
        except BaseException:
            self.close()
            raise
        if self._transfer is not None:
            threading.Thread(target=self._keep_claim, name="hwgrpo-server-watch", daemon=True).start()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about how this engine runs here."""
        process = self._server.process
        origin = f"started here, its log is {process.log}" if process else "already running"
        on_host = self._parts.device.torch_device.type == "cpu"
        asleep = sleeps(self._parts.config, on_host=on_host)
        memory = f"it {'frees' if asleep else 'keeps'} its memory during updates"
        memory = "on a CPU its sleep frees nothing" if asleep and on_host else memory
        place = f"rollout by the {self._api.name} server at {self._client.url} ({origin}); {memory}"
        place += f"; {self._api.caveat}" if self._api.caveat else ""
        way = (f"weights go to the rollout server through {self._transfer.description}",) if self._transfer else ()
        return (place, *way)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: the server does not recover, or keeps sending invalid responses.
            Stopped: another thread has closed the engine, or stopped the gate.
        """
        if not self._usable:
            raise RuntimeError("the rollout server is asleep or closed: call update_weights() before generate()")
        assert len(batch) > 0
        check_batch(batch, sampling, self._parts.model.config)
        self._failure = None
        start = time.perf_counter()
        requests = make_requests(batch, sampling)
        end_ids = end_token_ids(self._parts.tokenizer, self._parts.model.generation_config, sampling.stop_token_ids)
        deadlines = GroupDeadlines(len(requests), sampling.group_timeout)
        with ThreadPoolExecutor(min(THREADS, len(requests))) as pool:
            sample = partial(self._sample, sampling=sampling, end_ids=end_ids, deadlines=deadlines)
            with deadlines.reported():
                samples = list(pool.map(sample, count(), requests))
        result = deadlines.apply(make_completions(samples, sampling, self._parts.tokenizer, end_ids, self._version))
        seconds = max(time.perf_counter() - start, 1e-9)
        self.metrics = {
            "perf/rollout_tokens_per_second": len(result.tokens) / seconds,
            "rollout/server_retries": float(self._retries),
            "rollout/server_restarts": float(self._restarts),
        }
        return result

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]] | None:
        """Return the log-probs of each sequence's tokens after the first at temperature 1, on rank 0 only.

        Args:
            sequences: token ids.
            adapter: with the adapter, if there is one.

        Returns:
            None on other ranks, which share the server, and where its kind cannot score.

        Raises:
            RunError: the server does not recover, or keeps sending invalid responses.
        """
        if self._transfer is None or not self._api.can_score:
            return None
        self._failure = None
        model = self._server.model if adapter else self._server.base_model

        def score(tokens: Sequence[int]) -> tuple[list[float], str | None]:
            return self._api.score(self._client, model, self._version, tokens, self._settings.request_timeout)

        return [self._request(lambda tokens=tokens: score(tokens), lambda scores: None) for tokens in sequences]

    def update_weights(self, version: int) -> None:
        """Send the policy's current weights, or only its adapter where only that is trained. All ranks call it."""
        self._send_weights(version, self._parts.weights.adapter())

    def sleep(self) -> None:
        """Have the server free its weights and cache, until it gets new weights.

        Raises:
            RunError: it does not.
        """
        self._usable = False
        if self._transfer is None:
            return
        for attempt in range(self._settings.retries + 1):
            try:
                self._api.sleep(self._client, self._sleep_level, self._owner, self._settings.request_timeout)
                return
            except ServerProblem as problem:
                process = self._server.process
                if process is not None and not process.alive:
                    return  # its memory is free, and new weights start it again
                if attempt == self._settings.retries:
                    raise RunError(f"the rollout server did not free its memory: {problem}") from problem
                time.sleep(PAUSE)

    def health(self) -> bool:
        """Return whether the server responds and has the current weights."""
        try:
            return self._usable and self._has_current_weights()
        except ServerInUse:
            return False

    def close(self) -> None:
        """Stop the server if the run started it, and remove weights in transfer."""
        self._usable = False
        self._closed.set()
        process = self._server.process
        self._client.abort_requests()  # threads that wait for a response stop waiting
        held = self._recovering.acquire(blocking=False)
        if not held:
            if process is not None:
                process.stop()  # also aborts requests of another thread
            held = self._recovering.acquire(timeout=CLOSE_TIMEOUT)
        try:
            if self._transfer is not None:
                if process is None:
                    with contextlib.suppress(ServerProblem, ServerInUse):  # it may be gone, or another run's
                        self._api.release(self._client, self._owner, HEALTH_TIMEOUT)
                self._transfer.close()
                self._transfer = None
            if process is not None:
                process.stop()
        finally:
            if held:
                self._recovering.release()

    def _is_over(self) -> bool:
        """Return whether this engine is closed, or the thread that generates is to end."""
        gate = self._parts.gate
        return self._closed.is_set() or (gate is not None and gate.stopped)

    def _send_weights(self, version: int, adapter: AdapterWeights | None) -> None:
        """Send weights from rank 0; the other ranks take part in gathering them."""
        self._failure = None
        if not self._usable:
            self._parts.device.empty_cache()  # before the server wakes up
        if self._ranks > 1:
            dist.barrier()  # all ranks have their responses: none is sampled with weights that are too new
        if self._transfer is None:
            self._version = version
            if adapter is None:
                for _ in self._parts.weights.full():
                    pass
            self._wait_for_rank_0()
            self._has_sent = self._usable = True
            return
        with self._recovering:
            self._version = version
            try:
                self._transfer.prepare(version, self._parts.weights, adapter)
            except RunError:
                self._served_label()  # raises ServerInUse where another process of this run removed the files
                raise
            self._deliver()
            self._transfer.discard_old()
            self._has_sent = self._usable = True

    def _deliver(self) -> None:
        assert self._transfer is not None
        for attempt in range(self._settings.retries + 1):
            try:
                self._transfer.send()
                return
            except ServerProblem as problem:
                if attempt == self._settings.retries:
                    raise RunError(f"the rollout server did not apply weights {self._version}: {problem}") from problem
                self._recover(f"it did not apply weights: {problem}")
                if self._has_current_weights():
                    return

    def _wait_for_rank_0(self) -> None:
        """Wait until the server has the weights that rank 0 sends.

        Raises:
            RunError: rank 0 did not send them in time.
        """
        s = self._settings
        seconds = (s.retries + 1) * (s.start_timeout + s.request_timeout)
        wait = Wait(f"weights {self._version}, which rank 0 sends to the rollout server", seconds)
        while self._served_label() != self._owner.label(self._version):
            if wait.over:
                raise RunError(f"the rollout server did not get weights {self._version} within {seconds:g} s")
            wait.pause(PAUSE / 10)

    def _sample(
        self, group: int, request: Request, *, sampling: Sampling, end_ids: tuple[int, ...], deadlines: GroupDeadlines
    ) -> list[Sample] | None:
        """Return the samples of a prompt; None where both dispatches missed the deadline."""
        server_request = ServerRequest(self._server.model, self._version, request, sampling, end_ids)
        vocabulary = self._parts.model.config.get_text_config().vocab_size

        def sample() -> tuple[list[Sample], str | None]:
            timeout = sampling.group_timeout or self._settings.request_timeout
            return self._api.sample(self._client, server_request, timeout)

        again = True
        while again:
            deadlines.dispatch(group)
            try:
                samples = self._request(
                    sample,
                    lambda samples: find_problem(samples, request, sampling, vocabulary),
                    raise_late=sampling.group_timeout is not None,
                )
                deadlines.finish(group)
                return samples
            except TimedOut:  # the connection is closed: the server aborts the request
                again = deadlines.miss(group)
        return None

    def _request(
        self,
        send: Callable[[], tuple[T, str | None]],
        problem_of: Callable[[T], str | None],
        *,
        raise_late: bool = False,
    ) -> T:
        """Return the result of a request that the current weights have answered; recover the server if it fails.

        Args:
            send: sends it; returns its result and the label of the weights.
            problem_of: returns why a result is invalid, or None.
            raise_late: raise TimedOut for a request that a healthy server has not answered in time.
        """
        wanted = self._owner.label(self._version)
        for attempt in range(self._settings.retries + 1):
            if self._is_over():
                raise Stopped
            self._check_failure()
            try:
                result, sampled_with = send()
                if sampled_with != wanted:
                    check_owner(sampled_with, self._owner)
                    raise InvalidResponse(f"the response was sampled with weights {sampled_with}, not {wanted}")
                problem = problem_of(result)
                if problem is not None:
                    raise InvalidResponse(problem)
                return result
            except ServerInUse as in_use:
                self._fail(in_use)
                raise
            except ServerProblem as problem:
                if self._is_over():
                    raise Stopped from None
                if raise_late and isinstance(problem, TimedOut) and self.health():
                    raise
                if attempt == self._settings.retries:
                    self._check_failure()
                    error = RunError(
                        f"the rollout server at {self._client.url} failed {attempt + 1} times in a row "
                        f"(rollout.server.retries={self._settings.retries}); the last error: {problem}"
                        f"{NOT_FINITE if NOT_JSON in str(problem) else ''}"
                    )
                    self._fail(error)
                    raise error from problem
                self._retries += 1
                self._recover(str(problem))
        raise AssertionError("the loop returns or raises")

    def _fail(self, error: RunError) -> None:
        """Record that the server cannot be used, and abort all requests."""
        self._failure = self._failure or error
        self._client.abort_requests()

    def _check_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise RunError(str(failure)) from failure

    def _recover(self, problem: str) -> None:
        """Wait until the server is healthy and has the current weights, or the engine is closed.

        Raises:
            RunError: it does not recover in time, or did not while another thread waited for it.
        """
        with self._recovering:  # of many requests that failed at once, the first recovers the server
            self._check_failure()  # or has failed to: the others need not try again
            seconds = self._settings.start_timeout
            wait = Wait(f"the rollout server at {self._client.url}, after {problem}", seconds)
            try:
                while not self._is_over() and not self._has_current_weights():
                    if wait.over:
                        raise RunError(
                            f"the rollout server at {self._client.url} did not recover within rollout.server."
                            f"start_timeout={seconds:g} s; the first error: {problem}"
                        )
                    self._repair(wait)
            except RunError as error:
                self._fail(error)
                raise

    def _repair(self, wait: Wait) -> None:
        """Restart the server or send its weights again, where this rank can, or wait a moment."""
        process = self._server.process
        try:
            self._client.request("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            if process is None:
                wait.pause(PAUSE)
                return
            self._restarts += 1
            try:
                process.start()
                process.wait_until_healthy(self._client, wait.left, self._is_over)
            except ConfigError as error:  # it started with these settings before
                raise RunError(f"the rollout server cannot be started again: {error}") from error
        if self._is_over():  # the request was aborted for that reason
            return
        try:
            if self._transfer is not None:
                self._transfer.send()
            else:
                wait.pause(PAUSE)  # rank 0 will
        except ServerProblem:
            wait.pause(PAUSE)

    def _keep_claim(self) -> None:
        """Keep this run's claim on the server, and recover it for the ranks that cannot.

        A slow server is left alone: the threads that wait for it notice a timeout.
        """
        while not self._closed.wait(HEARTBEAT):
            try:
                label = self._served_label()
            except ServerInUse:
                return  # the next request raises it
            if self._ranks == 1 or not self._usable or not self._recovering.acquire(blocking=False):
                continue  # the only rank recovers it, new weights do (started now, it would not sleep), or a thread is
            try:
                process = self._server.process
                died = process is not None and not process.alive
                if not self._closed.is_set() and (died or label not in (None, self._owner.label(self._version))):
                    self._recover("it died, or lost its weights")
            except RunError:
                return  # the ranks that wait for it raise their own error
            finally:
                self._recovering.release()

    def _has_current_weights(self) -> bool:
        try:
            self._client.request("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            return False
        return self._served_label() == self._owner.label(self._version)

    def _served_label(self) -> str | None:
        """Return the label of the server's weights; None where it does not respond.

        Raises:
            ServerInUse: it had weights of this run, and now has those of another one.
        """
        try:
            label = self._api.version(self._client, HEALTH_TIMEOUT)
        except ServerProblem:
            return None
        if self._has_sent:
            check_owner(label, self._owner)
        return label
