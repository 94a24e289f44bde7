"""vLLM as a separate server, in this environment or another.

A small plugin inside the server (`vllm_plugin/hwgrpo_vllm`) checks the token, loads weights between requests and labels
every response with the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.rollout import vllm_plugin
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Sample
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, InvalidResponse
from hwgrpo.rollout.server.server_api import MODEL, GroupSupport, ServerRequest, command_line, inherited_environment
from hwgrpo.rollout.server.server_connection import check_running_server, python_of
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.vllm.vllm_settings import engine_arguments
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    LEASE,
    LIFELINE_VARIABLE,
    PROTOCOL,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from hwgrpo.support.text import hide_secrets

PLUGIN = Path(vllm_plugin.__file__).parent
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Weights that vllm-ascend has reformatted cannot be exchanged; for a server on NPUs of a trainer that has none.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}


def vllm_server(parts: EngineParts) -> ServerEngine:
    """Return an engine that samples by a vLLM server."""
    return ServerEngine(parts, VllmServer())


def check_running(config: Config) -> None:
    """Check that the server at `rollout.server.url` responds, is vLLM with the plugin and accepts the token.

    Raises:
        ConfigError: one of these does not hold.
    """
    check_running_server(config.rollout, VllmServer())


class VllmServer:
    """vLLM with this project's plugin; see `ServerApi` for the methods."""

    name = "vLLM"
    caveat = ""
    takeover_rule = (
        f"a run that has ended loses it {LEASE:g} s after its last request, and rollout.server.take_over=true takes "
        "it now"
    )
    start_command_hint = (
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
        python, _ = python_of(parts.config.rollout, "vllm", parts.device.backend)
        return [python, "-m", "vllm.entrypoints.openai.api_server", *command_line(arguments)]

    def environment(self, backend: Backend, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        own = {"PYTHONPATH": str(PLUGIN), TOKEN_VARIABLE: token, LIFELINE_VARIABLE: "1"}
        return DEFAULTS | inherited_environment(backend, ENVIRONMENT | dict(settings), own)

    def model_of(self, client: Client, timeout: float) -> str:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=timeout)
        self._check_protocol(status, client)
        models, _ = client.request("GET", "/v1/models", timeout=timeout)
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise InvalidResponse(f"/v1/models lists no model: {error!r}") from error

    def group_support(self, client: Client, timeout: float) -> GroupSupport | None:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=timeout)
        if not isinstance(status, dict) or "library" not in status:
            return None
        return GroupSupport(str(status["library"]), status.get("workers", 0))

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        client.request("POST", WEIGHTS_ROUTE, {"owner": owner.payload()}, timeout=timeout)

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        client.request("POST", WEIGHTS_ROUTE, {"owner": owner.payload(), "release": True}, timeout=timeout)

    def version(self, client: Client, timeout: float) -> str | None:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=timeout)
        return status.get("version") if isinstance(status, dict) else None

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        body = {"folder": str(folder), "version": owner.label(version), "adapter": adapter, "owner": owner.payload()}
        client.request("POST", WEIGHTS_ROUTE, body, timeout=timeout)

    def sample(self, client: Client, server_request: ServerRequest, timeout: float) -> tuple[list[Sample], str | None]:
        reply, headers = client.request("POST", "/v1/completions", completion_body(server_request), timeout=timeout)
        return parse_samples(reply), headers.get(VERSION_HEADER)

    can_score = True

    def score(
        self, client: Client, model: str, version: int, tokens: Sequence[int], timeout: float
    ) -> tuple[list[float], str | None]:
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "cache_salt": f"weights {version}",
        }
        reply, headers = client.request("POST", "/v1/completions", body, timeout=timeout)
        return parse_scores(reply, tokens), headers.get(VERSION_HEADER)

    def _check_protocol(self, status: Any, client: Client) -> None:
        """Check that a server has this trainer's version of the plugin.

        Raises:
            ConfigError: it has another one.
        """
        version = status.get("protocol", 1) if isinstance(status, dict) else None
        if version != PROTOCOL:
            raise ConfigError(
                f"rollout.server.url={hide_secrets(client.url)!r}: the server's plugin hwgrpo_vllm has version "
                f"{version} of the protocol and this trainer {PROTOCOL}; before 2 weights have no checksums. End the "
                f"server. {self.start_command_hint}"
            )

    def can_sleep(self, client: Client, timeout: float) -> bool:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=timeout)
        return isinstance(status, dict) and status.get("can_sleep") is True

    def sleep(self, client: Client, level: int, owner: Owner, timeout: float) -> None:
        body = {"owner": owner.payload(), "sleep": level}
        client.request("POST", WEIGHTS_ROUTE, body, timeout=timeout)


def completion_body(server_request: ServerRequest) -> dict[str, Any]:
    """Return the body for /v1/completions."""
    sampling = server_request.request.sampling
    return {
        "model": server_request.model,
        "prompt": list(server_request.request.tokens),
        "n": server_request.request.n,
        "seed": server_request.request.seed,
        "max_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(server_request.end_ids),
        "skip_special_tokens": sampling.skip_special_tokens,
        "ignore_eos": True,  # EOS is among the stop tokens
        "logprobs": 0,
        "return_token_ids": True,
        # keeps the prefix cache of older weights from being used
        "cache_salt": f"weights {server_request.version}",
    }


def parse_samples(reply: Any) -> list[Sample]:
    """Parse the samples of a /v1/completions response.

    Raises:
        InvalidResponse: a field is missing or has another type.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != [*range(len(choices))]:
            raise InvalidResponse("the samples of the response are not indexed from 0")
        return [
            Sample([*choice["token_ids"]], [*choice["logprobs"]["token_logprobs"]], _stopped(choice["finish_reason"]))
            for choice in choices
        ]
    except (KeyError, TypeError) as error:
        raise InvalidResponse(f"the response lacks a field, or a field has another type: {error!r}") from error


def parse_scores(reply: Any, tokens: Sequence[int]) -> list[float]:
    """Parse the log-probs of a prompt's tokens after the first, of a /v1/completions response.

    Raises:
        InvalidResponse: a field is missing or has another type, or a token has no log-prob.
    """
    try:
        (choice,) = reply["choices"]
        entries = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"the response lacks the prompt's log-probs: {error!r}") from error


def _stopped(reason: Any) -> bool:
    if reason not in ("stop", "length"):
        raise InvalidResponse(f"a sample was aborted: finish_reason={reason!r}")
    return reason == "stop"
