"""Responses by a server that all ranks share, over HTTP; `Dialect` says what kind of server it is.

A server that dies, hangs or answers garbage is started again if it is ours, else waited for; it gets the current
weights again and the request is repeated.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import distributed as dist

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.pause_gate import Stopped
from hwgrpo.rollout.requests import Answer, Request, check_batch, completions_of, problem_of, requests_of
from hwgrpo.rollout.server.attachment import HEALTH_TIMEOUT, attach
from hwgrpo.rollout.server.dialect import Dialect, Question
from hwgrpo.rollout.server.http_client import Garbage, ServerProblem, ServerTaken
from hwgrpo.rollout.server.owner import check_owner
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.weights import AdapterWeights
from hwgrpo.values import Completions, PromptBatch, Sampling
from hwgrpo.waits import Wait

THREADS = 64
"""Requests that a rank has under way at a time."""
PAUSE = 0.5
WATCH = 2.0
"""Seconds between requests to the server by which it hears that this run is there."""
CLOSE_TIMEOUT = 60.0
"""Seconds that `close` waits for another thread to stop waiting for the server."""
NOT_JSON = "Out of range float values are not JSON compliant"
"""What a server answers whose log-probs are not numbers."""
NOT_FINITE = ". Log-probs are not finite: weights contain NaN or infinite values, or a dtype overflows (rollout.dtype)"


class ServerEngine:
    """Samples by a server that all ranks share; rank 0 starts it, sends it weights and looks after it.

    Args:
        parts: what an engine is made from.
        dialect: how the server is started and spoken to.

    Raises:
        ConfigError: the server does not start, is of another kind or in use by another run, or the token is missing or
            refused.
        RunError: weights cannot be handed over.
    """

    def __init__(self, parts: EngineParts, dialect: Dialect) -> None:
        self._parts, self._dialect = parts, dialect
        self._settings = parts.config.rollout.server
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._version = 0
        self._usable = True
        self._recovering = threading.RLock()
        self._failure: RunError | None = None
        """Why the server cannot be used, once that is known: who else waits for it stops waiting."""
        self._has_sent = False
        """Whether the server has had weights of this run."""
        self._closed = threading.Event()
        self._restarts = self._retries = 0
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens), and since the start
        rollout/server_retries (requests sent again) and rollout/server_restarts."""
        adapter = parts.weights.adapter()
        self._server = attach(parts, dialect, adapter)
        self._client, self._delivery, self._owner = self._server.client, self._server.delivery, self._server.owner
        try:
            self._take(0, adapter)
        except BaseException:
            self.close()
            raise
        if self._delivery is not None:
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
        self._failure = None
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
                raise RunError(f"the rollout server did not wake up: {problem}") from problem
        self._usable = True

    def health(self) -> bool:
        """Return whether the server answers and has the current weights."""
        try:
            return self._usable and self._has_current_weights()
        except ServerTaken:
            return False

    def close(self) -> None:
        """End the server if it is ours, be it only starting, and remove the weights that were on their way."""
        self._usable = False
        self._closed.set()
        process = self._server.process
        self._client.break_off()  # whoever waits for a response sees that all is over
        held = self._recovering.acquire(blocking=False)
        if not held:
            if process is not None:
                process.stop()  # what another thread waits for in it breaks off, too
            held = self._recovering.acquire(timeout=CLOSE_TIMEOUT)
        try:
            if self._delivery is not None:
                if process is None:
                    with contextlib.suppress(ServerProblem, ServerTaken):  # it may be gone, or another run's
                        self._dialect.release(self._client, self._owner, HEALTH_TIMEOUT)
                self._delivery.close()
                self._delivery = None
            if process is not None:
                process.stop()
        finally:
            if held:
                self._recovering.release()

    def _is_over(self) -> bool:
        """Return whether this engine is closed, or the thread that generates is to end."""
        gate = self._parts.gate
        return self._closed.is_set() or (gate is not None and gate.stopped)

    def _take(self, version: int, adapter: AdapterWeights | None) -> None:
        """Take weights on rank 0 and have the server take them; the other ranks take part in making them."""
        self._failure = None
        if self._ranks > 1:
            dist.barrier()  # the responses of all ranks are there: none is sampled with weights that are too new
        if self._delivery is None:
            self._version = version
            if adapter is None:
                for _ in self._parts.weights.whole():
                    pass
            self._wait_for_rank_0()
            self._has_sent = True
            return
        with self._recovering:
            self._version = version
            try:
                self._delivery.take(version, self._parts.weights, adapter)
            except RunError:
                self._label_there()  # another process of this run removes what this one wrote, which is then the reason
                raise
            self._hand_over()
            self._delivery.arrived()
            self._has_sent = True

    def _hand_over(self) -> None:
        assert self._delivery is not None
        for attempt in range(self._settings.retries + 1):
            try:
                self._delivery.send()
                return
            except ServerProblem as problem:
                if attempt == self._settings.retries:
                    raise RunError(f"the rollout server did not apply weights {self._version}: {problem}") from problem
                self._recover(f"it did not apply weights: {problem}")
                if self._has_current_weights():
                    return

    def _wait_for_rank_0(self) -> None:
        """Return when the server has the weights that rank 0 sends it.

        Raises:
            RunError: it has not got them in the time that rank 0 may take.
        """
        s = self._settings
        seconds = (s.retries + 1) * (s.start_timeout + s.request_timeout)
        wait = Wait(f"weights {self._version}, which rank 0 sends to the rollout server", seconds)
        while self._label_there() != self._owner.label(self._version):
            if wait.over:
                raise RunError(f"the rollout server did not get weights {self._version} within {seconds:g} s")
            wait.pause(PAUSE / 10)

    def _sample(self, request: Request, sampling: Sampling, end_ids: tuple[int, ...]) -> list[Answer]:
        question = Question(self._server.model, self._version, request, sampling, end_ids)
        vocabulary = self._parts.model.config.get_text_config().vocab_size
        wanted = self._owner.label(self._version)
        for attempt in range(self._settings.retries + 1):
            if self._is_over():
                raise Stopped
            self._check_failure()
            try:
                answers, sampled_with = self._dialect.sample(self._client, question, self._settings.request_timeout)
                if sampled_with != wanted:
                    check_owner(sampled_with, self._owner)
                    raise Garbage(f"the response was sampled with weights {sampled_with}, not {wanted}")
                problem = problem_of(answers, request, sampling, vocabulary)
                if problem is not None:
                    raise Garbage(problem)
                return answers
            except ServerTaken as taken:
                self._fail(taken)
                raise
            except ServerProblem as problem:
                if self._is_over():
                    raise Stopped from None
                if attempt == self._settings.retries:
                    self._check_failure()
                    error = RunError(
                        f"the rollout server at {self._client.url} failed {attempt + 1} times in a row "
                        f"(rollout.server.retries={self._settings.retries}), at last so: {problem}"
                        f"{NOT_FINITE if NOT_JSON in str(problem) else ''}"
                    )
                    self._fail(error)
                    raise error from problem
                self._retries += 1
                self._recover(str(problem))
        raise AssertionError("the loop returns or raises")

    def _fail(self, error: RunError) -> None:
        """Have all who wait for the server stop: it cannot be used."""
        self._failure = self._failure or error
        self._client.break_off()

    def _check_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            raise RunError(str(failure)) from failure

    def _recover(self, problem: str) -> None:
        """Return when the server is well and has the current weights, or nobody needs it any more.

        Raises:
            RunError: it does not come back in time, or did not while another thread waited for it.
        """
        with self._recovering:  # of many requests that failed at once, the first puts things right
            self._check_failure()  # or finds that it cannot: the others need not find out again
            seconds = self._settings.start_timeout
            wait = Wait(f"the rollout server at {self._client.url}, after {problem}", seconds)
            try:
                while not self._is_over() and not self._has_current_weights():
                    if wait.over:
                        raise RunError(
                            f"the rollout server at {self._client.url} did not come back within rollout.server."
                            f"start_timeout={seconds:g} s; what happened first: {problem}"
                        )
                    self._repair(wait)
            except RunError as error:
                self._fail(error)
                raise

    def _repair(self, wait: Wait) -> None:
        """Do what this rank can do for a server that is not well, or wait a moment."""
        process = self._server.process
        try:
            self._client.ask("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            if process is None:
                wait.pause(PAUSE)
                return
            self._restarts += 1
            try:
                process.start()
                process.wait_until_healthy(self._client, wait.left, self._is_over)
            except ConfigError as error:  # it did start with these settings before
                raise RunError(f"the rollout server cannot be started again: {error}") from error
        if self._is_over():  # what was asked broke off for that reason
            return
        try:
            if self._delivery is not None:
                self._delivery.send()
            else:
                wait.pause(PAUSE)  # rank 0 will
        except ServerProblem:
            wait.pause(PAUSE)

    def _watch(self) -> None:
        """Have the server hear from this run, and put right what rank 0 alone can while other ranks use it.

        A server that is slow is left alone: those who wait for it notice when it takes too long.
        """
        while not self._closed.wait(WATCH):
            try:
                label = self._label_there()
            except ServerTaken:
                return  # who uses it next notices, too, and says so
            if self._ranks == 1 or not self._recovering.acquire(blocking=False):
                continue  # the only rank looks after it by itself, or somebody is at it
            try:
                process = self._server.process
                gone = process is not None and not process.alive
                if not self._closed.is_set() and (gone or label not in (None, self._owner.label(self._version))):
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
        return self._label_there() == self._owner.label(self._version)

    def _label_there(self) -> str | None:
        """Return the label of the weights that the server has; None where it does not answer.

        Raises:
            ServerTaken: it had weights of this run, and has those of another one.
        """
        try:
            label = self._dialect.version(self._client, HEALTH_TIMEOUT)
        except ServerProblem:
            return None
        if self._has_sent:
            check_owner(label, self._owner)
        return label
