"""vLLM as a separate server, in this environment or another.

A small plugin inside the server (`vllm_plugin/hwgrpo_vllm`) checks the token, loads weights between requests and labels
every response with the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends import Backend

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.rollout import vllm_plugin
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Sample
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, InvalidResponse
from hwgrpo.rollout.server.server_api import (
    MODEL,
    GroupSupport,
    ScoreRequest,
    ServerRequest,
    command_line,
    inherited_environment,
)
from hwgrpo.rollout.server.server_connection import check_running_server, python_of
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.vllm.installed_vllm import IN_PROCESS, ask, is_supported
from hwgrpo.rollout.vllm.vllm_requests import SCORING, biases, parts_of, sampling_parameters
from hwgrpo.rollout.vllm.vllm_settings import engine_arguments
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    IMAGES_ROUTE,
    LEASE,
    LIFELINE_VARIABLE,
    PROTOCOL,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from hwgrpo.support.text import hide_secrets
from hwgrpo.values import PromptImages

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
    images = (
        None if parts.image_sample is None else ImageSettings(placeholder_ids(parts.model.config), parts.compute_dtype)
    )
    return ServerEngine(parts, VllmServer(images))


def check_running(config: Config) -> None:
    """Check that the server at `rollout.server.url` responds, is vLLM with the plugin and accepts the token.

    Raises:
        ConfigError: one of these does not hold.
    """
    check_running_server(config.rollout, VllmServer())


@dataclass(frozen=True)
class ImageSettings:
    """What requests for a model that reads images need to know of it."""

    banned: Sequence[int]
    """Tokens that no response has."""
    dtype: torch.dtype
    """Of the server's tower."""


class VllmServer:
    """vLLM with this project's plugin; see `ServerApi` for the methods.

    Args:
        images: None: the model reads text alone.
    """

    def __init__(self, images: ImageSettings | None = None) -> None:
        self._images = images
        self._banned = () if images is None else images.banned

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
        if self._images is not None:
            _check_takes_images(
                python, inherited_environment(parts.device.backend, dict(parts.config.rollout.server.env), {})
            )
        return [python, "-m", "vllm.entrypoints.openai.api_server", *command_line(arguments)]

    def environment(self, backend: Backend, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        own = {"PYTHONPATH": str(PLUGIN), TOKEN_VARIABLE: token, LIFELINE_VARIABLE: "1"}
        return DEFAULTS | inherited_environment(backend, ENVIRONMENT | dict(settings), own)

    def model_of(self, client: Client, timeout: float) -> str:
        status, _ = client.request("GET", WEIGHTS_ROUTE, timeout=timeout)
        self._check_protocol(status, client)
        self._check_images(status, client)
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
        request = server_request.request
        if request.images is None:
            body = completion_body(server_request, self._banned)
            reply, headers = client.request("POST", "/v1/completions", body, timeout=timeout)
            return parse_samples(reply), headers.get(VERSION_HEADER)
        settings = sampling_parameters(request, server_request.end_ids, self._banned)
        body = self._image_body(server_request.model, server_request.version, request.tokens, request.images, settings)
        reply, headers = client.request("POST", IMAGES_ROUTE, body, timeout=timeout)
        return parse_image_samples(reply, len(request.tokens)), headers.get(VERSION_HEADER)

    can_score = True

    def score(
        self, client: Client, model: str, version: int, request: ScoreRequest, timeout: float
    ) -> tuple[list[float], str | None]:
        tokens = request.tokens
        if request.images is not None:
            body = self._image_body(model, version, tokens, request.images, SCORING)
            reply, headers = client.request("POST", IMAGES_ROUTE, body, timeout=timeout)
            return parse_image_scores(reply, len(tokens) - 1), headers.get(VERSION_HEADER)
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

    def _image_body(
        self, model: str, version: int, tokens: Sequence[int], images: PromptImages, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        assert self._images is not None
        return {
            "model": model,
            "tokens": list(tokens),
            "images": [part.to_json(self._images.dtype) for part in parts_of(images)],
            "salt": f"weights {version}",
            "sampling": settings,
        }

    def _check_images(self, status: Any, client: Client) -> None:
        """Check that a server can be given prompts with images, where the model reads them.

        Raises:
            ConfigError: it cannot.
        """
        if self._images is None:
            return
        reason = status.get("without_images", "its plugin is older than this trainer")
        if reason:
            raise ConfigError(
                f"the server at {hide_secrets(client.url)} takes no prompts with images: {reason}. "
                "Use rollout.engine=local, or another server"
            )

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


def completion_body(server_request: ServerRequest, banned: Sequence[int] = ()) -> dict[str, Any]:
    """Return the body for /v1/completions.

    Args:
        server_request: the prompt and its settings.
        banned: tokens that no response has.
    """
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
        **({"logit_bias": biases(banned)} if banned else {}),
    }


def parse_samples(reply: Any) -> list[Sample]:
    """Parse the samples of a /v1/completions response.

    Raises:
        InvalidResponse: a field is missing or has another type.
    """
    try:
        choices = _in_order(reply["choices"])
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


def parse_image_samples(reply: Any, prompt: int) -> list[Sample]:
    """Parse the samples of a response to a prompt with images.

    Args:
        reply: the response.
        prompt: number of the prompt's tokens.

    Raises:
        InvalidResponse: a field is missing or has another type, or the server has read another number of tokens.
    """
    try:
        if reply["prompt"] != prompt:
            raise InvalidResponse(f"it has read {reply['prompt']} tokens of a prompt of {prompt}")
        samples = _in_order(reply["samples"])
        return [
            Sample([*sample["tokens"]], [*sample["logprobs"]], _stopped(sample["finish_reason"])) for sample in samples
        ]
    except (KeyError, TypeError) as error:
        raise InvalidResponse(f"the response lacks a field, or a field has another type: {error!r}") from error


def parse_image_scores(reply: Any, count: int) -> list[float]:
    """Parse the `count` log-probs of a sequence with images.

    Raises:
        InvalidResponse: a field is missing or has another type, or there are others than `count`.
    """
    try:
        scores = [float(score) for score in reply["scores"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"the response lacks the prompt's log-probs: {error!r}") from error
    if len(scores) != count:
        raise InvalidResponse(f"the response has {len(scores)} log-probs of {count} tokens")
    return scores


def _check_takes_images(python: str, environ: Mapping[str, str]) -> None:
    """Check that the vLLM that a server is started with takes prompts with images.

    Raises:
        ConfigError: it is older.
    """
    found = ask(python, environ)
    if is_supported(found.version, IN_PROCESS) is False:
        raise ConfigError(
            f"rollout.engine='vllm_server': {found.text} takes no prompts with images, {IN_PROCESS} is needed; "
            "use rollout.engine=local"
        )


def _in_order(samples: Any) -> list[Any]:
    """Return the samples of a response by their indices.

    Raises:
        InvalidResponse: they are not indexed from 0.
        KeyError, TypeError: a field is missing or has another type.
    """
    ordered = sorted(samples, key=lambda sample: sample["index"])
    if [sample["index"] for sample in ordered] != [*range(len(ordered))]:
        raise InvalidResponse("the samples of the response are not indexed from 0")
    return ordered


def _stopped(reason: Any) -> bool:
    if reason not in ("stop", "length"):
        raise InvalidResponse(f"a sample was aborted: finish_reason={reason!r}")
    return reason == "stop"
