"""Responses by a server that all ranks share, over HTTP; `Dialect` says what kind of server it is.

A server that dies, hangs or answers garbage is started again if it is ours, else waited for; it gets the current
weights again and the request is repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import distributed as dist

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.engine import Sampling
from hwgrpo.rollout.gate import Stopped
from hwgrpo.rollout.http_client import Garbage, ServerProblem
from hwgrpo.rollout.parts import EngineParts
from hwgrpo.rollout.requests import Answer, Request, check_batch, completions_of, problem_of, requests_of
from hwgrpo.rollout.server_attachment import HEALTH_TIMEOUT, attach
from hwgrpo.rollout.server_words import Dialect, Question
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.weights import AdapterWeights
from hwgrpo.values import Completions, PromptBatch

THREADS = 64
"""Requests that a rank has under way at a time."""
PAUSE = 0.5
WATCH = 2.0
"""Seconds between looks at a server that other ranks use, too."""
NOT_JSON = "Out of range float values are not JSON compliant"
"""What a server answers whose log-probs are not numbers."""
NOT_FINITE = ". Log-probs are not finite: weights hold NaN or infinite values, or a dtype overflows (rollout.dtype)"


class ServerEngine:
    """Samples by a server that all ranks share; rank 0 starts it, sends it weights and looks after it.

    Args:
        parts: what an engine is made from.
        dialect: how the server is started and spoken to.

    Raises:
        ConfigError: the server does not start or is of another kind, the token is missing or refused.
        RunError: weights cannot be handed over.
    """

    def __init__(self, parts: EngineParts, dialect: Dialect) -> None:
        self._parts, self._dialect = parts, dialect
        self._settings = parts.config.rollout.server
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._version = 0
        self._usable = True
        self._recovering = threading.RLock()
        self._closed = threading.Event()
        self._restarts = self._retries = 0
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens), and since the start
        rollout/server_retries (requests sent again) and rollout/server_restarts."""
        adapter = parts.weights.adapter()
        self._server = attach(parts, dialect, adapter)
        self._client, self._delivery = self._server.client, self._server.delivery
        try:
            self._take(0, adapter)
        except BaseException:
            self.close()
            raise
        if self._ranks > 1 and self._delivery is not None:
            threading.Thread(target=self._watch, name="hwgrpo-server-watch", daemon=True).start()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how this engine works here."""
        process = self._server.process
        whose = f"started here, its log is {process.log}" if process else "running already"
        place = f"rollout by the {self._dialect.name} server at {self._client.url} ({whose}); {self._dialect.caveat}"
        way = (f"weights go to the rollout server through {self._delivery.way}",) if self._delivery else ()
        return (place, *way)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: the server does not recover, or goes on answering what is no answer.
            Stopped: another thread has closed the engine, or stopped the gate.
        """
        if not self._usable:
            raise RuntimeError("the rollout server is asleep or closed: call wake() before generate()")
        assert len(batch) > 0
        check_batch(batch, sampling, self._parts.model.config)
        began = time.perf_counter()
        requests = requests_of(batch, sampling)
        end_ids = end_token_ids(self._parts.tokenizer, self._parts.model.generation_config, sampling.stop_token_ids)
        with ThreadPoolExecutor(min(THREADS, len(requests))) as pool:
            answers = list(pool.map(lambda request: self._sample(request, sampling, end_ids), requests))
        result = completions_of(answers, sampling, self._parts.tokenizer, end_ids, self._version)
        seconds = max(time.perf_counter() - began, 1e-9)
        self.metrics = {
            "perf/rollout_tokens_per_second": len(result.tokens) / seconds,
            "rollout/server_retries": float(self._retries),
            "rollout/server_restarts": float(self._restarts),
        }
        return result

    def update_weights(self, version: int) -> None:
        """Hand over the policy's current weights, or its adapter where that alone is trained. All ranks call it."""
        self._take(version, self._parts.weights.adapter())

    def sleep(self) -> None:
        """Take no more requests. A server that no other rank uses gives memory back, if its kind can."""
        self._usable = False
        if self._ranks == 1:
            try:
                self._dialect.sleep(self._client, self._settings.request_timeout)
            except ServerProblem as problem:
                raise RunError(f"the rollout server did not give its memory back: {problem}") from problem

    def wake(self) -> None:
        """Take requests again, with the weights of before."""
        if self._ranks == 1 and not self._usable:
            try:
                if self._dialect.wake(self._client, self._settings.request_timeout):
                    self._hand_over()
            except ServerProblem as problem:
                raise RunError(f"the rollout server did not take its memory again: {problem}") from problem
        self._usable = True

    def health(self) -> bool:
        """Return whether the server answers and has the current weights."""
        return self._usable and self._has_current_weights()

    def close(self) -> None:
        """End the server if it is ours, be it only starting, and remove the weights that were on their way."""
        self._usable = False
        self._closed.set()
        process = self._server.process
        if not self._recovering.acquire(blocking=False):
            if process is not None:
                process.stop()  # what another thread waits for in it breaks off, and the thread sees that all is over
            self._recovering.acquire()
        try:
            if self._delivery is not None:
                self._delivery.close()
                self._delivery = None
            if process is not None:
                process.stop()
        finally:
            self._recovering.release()

    def _is_over(self) -> bool:
        """Return whether this engine is closed, or the thread that generates is to end."""
        gate = self._parts.gate
        return self._closed.is_set() or (gate is not None and gate.stopped)

    def _take(self, version: int, adapter: AdapterWeights | None) -> None:
        """Take weights on rank 0 and have the server take them; the other ranks take part in making them."""
        if self._ranks > 1:
            dist.barrier()  # the responses of all ranks are there: none is sampled with weights that are too new
        if self._delivery is None:
            self._version = version
            if adapter is None:
                for _ in self._parts.weights.whole():
                    pass
            self._wait_for_rank_0()
            return
        with self._recovering:
            self._version = version
            self._delivery.take(version, self._parts.weights, adapter)
            self._hand_over()
            self._delivery.arrived()

    def _hand_over(self) -> None:
        assert self._delivery is not None
        for attempt in range(self._settings.retries + 1):
            try:
                self._delivery.send()
                return
            except ServerProblem as problem:
                if attempt == self._settings.retries:
                    raise RunError(f"the rollout server did not take weights {self._version}: {problem}") from problem
                self._recover(f"it did not take weights: {problem}")
                if self._has_current_weights():
                    return

    def _wait_for_rank_0(self) -> None:
        """Return when the server has the weights that rank 0 sends it.

        Raises:
            RunError: it has not got them in the time that rank 0 may take.
        """
        s = self._settings
        seconds = (s.retries + 1) * (s.start_timeout + s.request_timeout)
        end = time.monotonic() + seconds
        while self._version_there() != self._version:
            if time.monotonic() > end:
                raise RunError(f"the rollout server did not get weights {self._version} within {seconds:g} s")
            time.sleep(PAUSE / 10)

    def _sample(self, request: Request, sampling: Sampling, end_ids: tuple[int, ...]) -> list[Answer]:
        question = Question(self._server.model, self._version, request, sampling, end_ids)
        vocabulary = self._parts.model.config.get_text_config().vocab_size
        for attempt in range(self._settings.retries + 1):
            if self._is_over():
                raise Stopped
            try:
                answers, sampled_with = self._dialect.sample(self._client, question, self._settings.request_timeout)
                if sampled_with != str(self._version):
                    raise Garbage(f"the answer was sampled with weights {sampled_with}, not {self._version}")
                problem = problem_of(answers, request, sampling, vocabulary)
                if problem is not None:
                    raise Garbage(problem)
                return answers
            except ServerProblem as problem:
                if attempt == self._settings.retries:
                    raise RunError(
                        f"the rollout server at {self._client.url} failed {attempt + 1} times in a row "
                        f"(rollout.server.retries={self._settings.retries}), at last so: {problem}"
                        f"{NOT_FINITE if NOT_JSON in str(problem) else ''}"
                    ) from problem
                self._retries += 1
                self._recover(str(problem))
        raise AssertionError("the loop returns or raises")

    def _recover(self, problem: str) -> None:
        """Return when the server is well and has the current weights, or nobody needs it any more.

        Raises:
            RunError: it does not come back in time.
        """
        with self._recovering:  # of many requests that failed at once, the first puts things right
            end = time.monotonic() + self._settings.start_timeout
            while not self._is_over() and not self._has_current_weights():
                if time.monotonic() > end:
                    raise RunError(
                        f"the rollout server at {self._client.url} did not come back within rollout.server."
                        f"start_timeout={self._settings.start_timeout:g} s; what happened first: {problem}"
                    )
                self._repair()

    def _repair(self) -> None:
        """Do what this rank can do for a server that is not well, or wait a moment."""
        process = self._server.process
        try:
            self._client.ask("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            if process is None:
                time.sleep(PAUSE)
                return
            self._restarts += 1
            try:
                process.start()
                process.wait_until_healthy(self._client, self._settings.start_timeout, self._is_over)
            except ConfigError as error:  # it did start with these settings before
                raise RunError(f"the rollout server cannot be started again: {error}") from error
            if self._is_over():
                return
        try:
            if self._delivery is not None:
                self._delivery.send()
            else:
                time.sleep(PAUSE)  # rank 0 will
        except ServerProblem:
            time.sleep(PAUSE)

    def _watch(self) -> None:
        """Put right, while only other ranks have requests under way, what rank 0 alone can.

        A server that is slow is left alone: those who wait for it notice when it takes too long.
        """
        while not self._closed.wait(WATCH):
            if not self._recovering.acquire(blocking=False):
                continue  # somebody is at it
            try:
                process = self._server.process
                gone = process is not None and not process.alive
                if not self._closed.is_set() and (gone or self._version_there() not in (None, self._version)):
                    self._recover("it died, or lost its weights")
            except RunError:
                return  # the ranks that wait for it give up by themselves, and say so
            finally:
                self._recovering.release()

    def _has_current_weights(self) -> bool:
        try:
            self._client.ask("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            return False
        return self._version_there() == self._version

    def _version_there(self) -> int | None:
        """Return the version of the weights that the server has; None where it does not answer."""
        try:
            return self._dialect.version(self._client, HEALTH_TIMEOUT)
        except ServerProblem:
            return None
