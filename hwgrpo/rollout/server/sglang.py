"""SGLang as a separate server, by its own HTTP routes: no code of this project runs inside.

Written after SGLang 0.5.23's sources and tested against a fake server: never against a real one, nor on hardware. The
routes and fields in use are checked against its wheel (tests/vllm/rollout_uses.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend

from hwgrpo.config import Config
from hwgrpo.config.derived import sequences_at_once
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Sample
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, InvalidResponse, ServerInUse
from hwgrpo.rollout.server.server_api import MODEL, GroupSupport, ScoreRequest, ServerRequest, inherited_environment
from hwgrpo.rollout.server.server_connection import check_running_server, python_of
from hwgrpo.rollout.server.server_owner import Owner, check_owner, parse_owner
from hwgrpo.rollout.sglang_plugin import hwgrpo_sglang
from hwgrpo.rollout.shared_devices import memory_share

ENVIRONMENT = {
    # A health check would otherwise sample a token, which waits for a weight transfer in progress.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Log-probs at the temperature that tokens are token_logprobs at.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}
FREE = "free"
"""Version of the weights of a run that has ended."""


def sglang_server(parts: EngineParts) -> ServerEngine:
    """Return an engine that samples by an SGLang server."""
    return ServerEngine(parts, SglangServer())


def check_running(config: Config) -> None:
    """Check that the server at `rollout.server.url` responds, is SGLang and accepts the token.

    Raises:
        ConfigError: one of these does not hold.
    """
    check_running_server(config.rollout, SglangServer())


class SglangServer:
    """SGLang's native routes; see `ServerApi` for the methods."""

    name = "SGLang"
    caveat = (
        "this engine has never run with a real SGLang server; log-probs are those before top_k, top_p and min_p; a "
        "seed repeats its responses only with rollout.engine_kwargs={enable_deterministic_inference: true}"
    )
    start_command_hint = (
        "A server of your own is started as `python -m sglang.launch_server --model-path MODEL --api-key ... "
        "--sampling-defaults openai`"
    )

    can_score = False
    takeover_rule = "if that run ended without releasing it, rollout.server.take_over=true takes it over"

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        """Addresses of the servers that have loaded weights of this run."""

    def command(self, parts: EngineParts, adapter: AdapterWeights | None, host: str, port: int) -> list[str]:
        assert adapter is None, "checked with the settings"
        config = parts.config
        rollout, model = config.rollout, config.model
        on_host = parts.device.torch_device.type == "cpu"
        arguments: dict[str, Any] = {
            "model_path": resolve_model_path(model.path),
            "tokenizer_path": resolve_model_path(model.tokenizer or model.path),
            "revision": model.revision,
            "trust_remote_code": model.trust_remote_code,
            "device": "cpu" if on_host else None,
            "dtype": str(parts.compute_dtype).removeprefix("torch."),
            "load_format": "dummy",  # the policy's weights are sent next, and a missing one is noticed
            "sampling_defaults": "openai",
            "random_seed": config.trainer.seed,
            "context_length": rollout.max_model_len or config.data.max_prompt_tokens + rollout.max_response_tokens,
            "max_running_requests": sequences_at_once(rollout),
            "mem_fraction_static": memory_share(rollout),
            "disable_cuda_graph": on_host if rollout.enforce_eager is None else rollout.enforce_eager,
            "tp_size": rollout.tensor_parallel_size,
            "served_model_name": MODEL,
            "host": host,
            "port": port,
        }
        if different := parts.different_settings(adapted=False):
            arguments["json_model_override_args"] = json.dumps(different)
        start = [python_of(rollout, "sglang")[0], str(Path(hwgrpo_sglang.__file__))]
        return [*start, *_flags(arguments | dict(rollout.engine_kwargs))]

    def environment(self, backend: Backend, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        return inherited_environment(backend, ENVIRONMENT | dict(settings), {hwgrpo_sglang.TOKEN_VARIABLE: token})

    def model_of(self, client: Client, timeout: float) -> str:
        status = self._info(client, timeout)
        if "weight_version" not in status:
            raise InvalidResponse("/model_info has no weight_version")
        return str(status.get("served_model_name") or status.get("model_path"))

    def can_sleep(self, client: Client, timeout: float) -> bool:
        return False

    def group_support(self, client: Client, timeout: float) -> GroupSupport | None:
        return None

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        holder = parse_owner(self.version(client, timeout))
        if holder is None or holder.session == owner.session:
            return
        # The server cannot tell whether a run has ended, only that its weights are loaded. A session that has sent
        # weights before has lost the server to another one: it does not claim it back.
        if client.url in self._loaded or not (holder.run == owner.run or owner.take_over):
            raise ServerInUse(holder.name)

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        check_owner(self.version(client, timeout), owner)  # or the label of another run would be overwritten
        body = {"new_version": FREE, "abort_all_requests": False}
        client.request("POST", "/update_weight_version", body, timeout=timeout)

    def version(self, client: Client, timeout: float) -> str | None:
        return str(self._info(client, timeout).get("weight_version"))  # "default" before any weights are sent

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        assert not adapter, "checked with the settings"
        self.claim(client, owner, timeout)
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": owner.label(version),
            "flush_cache": True,  # keys and values computed with older weights
        }
        status, _ = client.request("POST", "/update_weights_from_disk", body, timeout=timeout)
        if not isinstance(status, dict) or status.get("success") is not True:
            raise InvalidResponse(f"it did not apply weights {version}: {status}")
        self._loaded.add(client.url)

    def sample(self, client: Client, server_request: ServerRequest, timeout: float) -> tuple[list[Sample], str | None]:
        reply, _ = client.request("POST", "/generate", generate_body(server_request), timeout=timeout)
        return parse_samples(reply)

    def score(
        self, client: Client, model: str, version: int, request: ScoreRequest, timeout: float
    ) -> tuple[list[float], str | None]:
        raise NotImplementedError("can_score says so")

    def sleep(self, client: Client, level: int, owner: Owner, timeout: float) -> None:
        raise AssertionError("checked with the settings")

    def _info(self, client: Client, timeout: float) -> dict[str, Any]:
        status, _ = client.request("GET", "/model_info", timeout=timeout)
        if not isinstance(status, dict):
            raise InvalidResponse(f"/model_info: {status}")
        return status


def generate_body(server_request: ServerRequest) -> dict[str, Any]:
    """Return the body for /generate: one request per sample, since samples of one request would share its seed."""
    request = server_request.request
    sampling = request.sampling
    shared = {
        "max_new_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k and not sampling.greedy else -1,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(server_request.end_ids),  # which ignore_eos would disable
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    return {
        "input_ids": [list(request.tokens)] * request.n,
        "sampling_params": [{**shared, "sampling_seed": request.seed + i} for i in range(request.n)],
        "return_logprob": True,
    }


def parse_samples(reply: Any) -> tuple[list[Sample], str | None]:
    """Parse the samples of a /generate response, and the version that drew them; None for several versions.

    Raises:
        InvalidResponse: a field is missing or has another type.
    """
    versions: set[str] = set()
    samples = []
    try:
        for sample in reply:
            status = sample["meta_info"]
            spans = status.get("weight_versions") or [{"version": status["weight_version"]}]
            versions |= {str(span["version"]) for span in spans}
            finish_type = status["finish_reason"]["type"]
            if finish_type not in ("stop", "length"):
                raise InvalidResponse(f"a sample was aborted: {status['finish_reason']}")
            token_logprobs = status["output_token_logprobs"]
            if [token for _, token, *_ in token_logprobs] != sample["output_ids"]:
                raise InvalidResponse("a sample's log-probs are of other tokens")
            samples.append(
                Sample([*sample["output_ids"]], [logprob for logprob, *_ in token_logprobs], finish_type == "stop")
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidResponse(f"the response lacks a field, or a field has another type: {error!r}") from error
    return samples, versions.pop() if len(versions) == 1 else None


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as command-line arguments; a bool is a flag that is present or absent."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif value is not None and value is not False:
            argv += [flag, str(value)]
    return argv
