"""vLLM as a server of its own, in this environment or another.

A small plugin inside the server (`vllm_plugin/hwgrpo_vllm`) asks for the token, takes weights between requests and says
with every answer which version sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.config.schema import Config
from hwgrpo.rollout import vllm_plugin
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.requests import Answer
from hwgrpo.rollout.server.attachment import check_running_server
from hwgrpo.rollout.server.dialect import MODEL, Offer, Question, command_line, inherited_environment
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, Garbage
from hwgrpo.rollout.server.owner import Owner
from hwgrpo.rollout.server.server_process import interpreter
from hwgrpo.rollout.vllm.vllm_settings import engine_arguments
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    LEASE,
    LIFELINE_VARIABLE,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from hwgrpo.rollout.weights import AdapterWeights

PLUGIN = Path(vllm_plugin.__file__).parent
DEFAULTS = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # Weights that vllm-ascend has reformatted cannot be exchanged; without effect elsewhere.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}


def vllm_server(parts: EngineParts) -> ServerEngine:
    """Return the engine that samples by a vLLM server."""
    return ServerEngine(parts, VllmServer())


def check_running(config: Config) -> None:
    """Check that the server at `rollout.server.url` is there, is of this kind and takes the token.

    Raises:
        ConfigError: it is not, or does not.
    """
    check_running_server(config, VllmServer())


class VllmServer:
    """vLLM with this project's plugin; see `Dialect` for the methods."""

    name = "vLLM"
    caveat = "it keeps its memory while we train"
    lease = (
        f"a run that is gone loses it {LEASE:g} s after it was last heard of, and rollout.server.take_over=true takes "
        "it now"
    )
    start_by_hand = (
        f"Start a server of your own with `{TOKEN_VARIABLE}=... PYTHONPATH={PLUGIN} python -m hwgrpo_vllm "
        "--model MODEL`, where python is that of the environment that has vLLM"
    )

    def command(self, parts: EngineParts, adapter: AdapterWeights | None, host: str, port: int) -> list[str]:
        arguments = engine_arguments(parts, adapter) | {
            "host": host,
            "port": port,
            "served_model_name": MODEL,
            "tensor_parallel_size": parts.config.rollout.tensor_parallel_size,
            "middleware": "hwgrpo_vllm.Guard",
            "worker_extension_cls": "hwgrpo_vllm.WorkerExtension",
        }
        # The same as `vllm serve`, which vllm-cpu 0.32 does not start: it looks for a package by the name of vllm.
        serve = [interpreter(parts.config.rollout.server.python), "-m", "vllm.entrypoints.openai.api_server"]
        return [*serve, *command_line(arguments)]

    def environment(self, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        own = {"PYTHONPATH": str(PLUGIN), TOKEN_VARIABLE: token, LIFELINE_VARIABLE: "1"}
        return DEFAULTS | inherited_environment(ENVIRONMENT | dict(settings), own)

    def model_of(self, client: Client, timeout: float) -> str:
        client.ask("GET", WEIGHTS_ROUTE, timeout=timeout)
        models, _ = client.ask("GET", "/v1/models", timeout=timeout)
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise Garbage(f"it does not say which model it serves: {error!r}") from error

    def offer(self, client: Client, timeout: float) -> Offer | None:
        told, _ = client.ask("GET", WEIGHTS_ROUTE, timeout=timeout)
        if not isinstance(told, dict) or "library" not in told:
            return None
        workers = told.get("workers")
        if type(workers) is not int or workers < 1:
            raise Garbage(f"{WEIGHTS_ROUTE}: workers={workers!r}")
        return Offer(str(told["library"]), workers)

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        client.ask("POST", WEIGHTS_ROUTE, {"owner": owner.order()}, timeout=timeout)

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        client.ask("POST", WEIGHTS_ROUTE, {"owner": owner.order(), "release": True}, timeout=timeout)

    def version(self, client: Client, timeout: float) -> str | None:
        told, _ = client.ask("GET", WEIGHTS_ROUTE, timeout=timeout)
        return told.get("version") if isinstance(told, dict) else None

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        order = {"folder": str(folder), "version": owner.label(version), "adapter": adapter, "owner": owner.order()}
        client.ask("POST", WEIGHTS_ROUTE, order, timeout=timeout)

    def sample(self, client: Client, question: Question, timeout: float) -> tuple[list[Answer], str | None]:
        reply, headers = client.ask("POST", "/v1/completions", completion_body(question), timeout=timeout)
        return answers_of(reply), headers.get(VERSION_HEADER)

    def sleep(self, client: Client, timeout: float) -> None:
        """It keeps its memory: its sleep is part of vLLM's development mode."""

    def wake(self, client: Client, timeout: float) -> bool:
        return False


def completion_body(question: Question) -> dict[str, Any]:
    """Return what /v1/completions is asked."""
    sampling = question.sampling
    return {
        "model": question.model,
        "prompt": list(question.request.tokens),
        "n": question.request.n,
        "seed": question.request.seed,
        "max_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(question.end_ids),
        "ignore_eos": True,  # it is among the stop tokens
        "logprobs": 0,
        "return_token_ids": True,
        # keeps what older weights computed of a prompt from being taken for it
        "cache_salt": f"weights {question.version}",
    }


def answers_of(reply: Any) -> list[Answer]:
    """Read the samples of an answer to /v1/completions.

    Raises:
        Garbage: it is built otherwise.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != [*range(len(choices))]:
            raise Garbage("the samples of the response are not numbered from 0 on")
        return [
            Answer([*choice["token_ids"]], [*choice["logprobs"]["token_logprobs"]], _stopped(choice["finish_reason"]))
            for choice in choices
        ]
    except (KeyError, TypeError) as error:
        raise Garbage(f"the response lacks a field, or a field has another type: {error!r}") from error


def _stopped(reason: Any) -> bool:
    if reason not in ("stop", "length"):
        raise Garbage(f"a sample was broken off: finish_reason={reason!r}")
    return reason == "stop"
