"""SGLang as a server of its own, by its own HTTP routes: nothing of this project runs inside.

Written after SGLang 0.5.23's sources and tried against a server that only looks like it: never against a real one, nor
on hardware. The routes and fields that are used are checked against its wheel (tests/vllm/rollout_uses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.config.schema import Config
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.requests import Answer
from hwgrpo.rollout.server.attachment import check_running_server
from hwgrpo.rollout.server.dialect import MODEL, Offer, Question, inherited_environment
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, Garbage, ServerTaken
from hwgrpo.rollout.server.owner import Owner, check_owner, owner_of
from hwgrpo.rollout.server.server_process import interpreter
from hwgrpo.rollout.sglang_plugin import hwgrpo_sglang
from hwgrpo.rollout.weights import AdapterWeights

ENVIRONMENT = {
    # A question after its health would else wait for a token that it samples, and that for weights on their way.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Log-probs at the temperature that tokens are drawn at.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}
FREE = "free"
"""Version of the weights of a run that has ended."""
SLEEPS = "enable_memory_saver"
"""The one of its arguments without which it cannot give memory back."""


def sglang_server(parts: EngineParts) -> ServerEngine:
    """Return the engine that samples by an SGLang server."""
    return ServerEngine(parts, SglangServer(sleeps=bool(parts.config.rollout.engine_kwargs.get(SLEEPS))))


def check_running(config: Config) -> None:
    """Check that the server at `rollout.server.url` is there, is of this kind and takes the token.

    Raises:
        ConfigError: it is not, or does not.
    """
    check_running_server(config, SglangServer())


class SglangServer:
    """SGLang's native routes; see `Dialect` for the methods.

    Args:
        sleeps: it was started so that it can give memory back.
    """

    name = "SGLang"
    caveat = (
        "this engine has never run with a real SGLang server; log-probs are those before top_k, top_p and min_p; a "
        "seed repeats its responses only with rollout.engine_kwargs={enable_deterministic_inference: true}"
    )
    start_by_hand = (
        "A server of your own is started as `python -m sglang.launch_server --model-path MODEL --api-key ... "
        "--sampling-defaults openai`"
    )

    lease = "if that run ended without releasing it, rollout.server.take_over=true takes it over"

    def __init__(self, *, sleeps: bool = False) -> None:
        self._sleeps = sleeps
        self._claimed = False

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
            "load_format": "dummy",  # the policy's weights follow, and none that is missing stays unnoticed
            "sampling_defaults": "openai",
            "random_seed": config.trainer.seed,
            "context_length": rollout.max_model_len or config.data.max_prompt_tokens + rollout.max_response_tokens,
            "max_running_requests": rollout.max_sequences,
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "disable_cuda_graph": on_host if rollout.enforce_eager is None else rollout.enforce_eager,
            "tp_size": rollout.tensor_parallel_size,
            "served_model_name": MODEL,
            "host": host,
            "port": port,
        }
        start = [interpreter(rollout.server.python), str(Path(hwgrpo_sglang.__file__))]
        return [*start, *_flags(arguments | dict(rollout.engine_kwargs))]

    def environment(self, token: str, settings: Mapping[str, str]) -> dict[str, str]:
        return inherited_environment(ENVIRONMENT | dict(settings), {hwgrpo_sglang.TOKEN_VARIABLE: token})

    def model_of(self, client: Client, timeout: float) -> str:
        told = self._info(client, timeout)
        if "weight_version" not in told:
            raise Garbage("it does not say which weights it has")
        return str(told.get("served_model_name") or told.get("model_path"))

    def offer(self, client: Client, timeout: float) -> Offer | None:
        return None

    def claim(self, client: Client, owner: Owner, timeout: float) -> None:
        holder = owner_of(self.version(client, timeout))
        if holder is None or holder.session == owner.session:
            return
        # It cannot say whether a run is gone, only that its weights are there. A session that has sent weights once is
        # not the one that comes: another has taken the server from it.
        if self._claimed or not (holder.run == owner.run or owner.take_over):
            raise ServerTaken(holder.name)

    def release(self, client: Client, owner: Owner, timeout: float) -> None:
        check_owner(self.version(client, timeout), owner)  # or another run would lose what it is called by
        order = {"new_version": FREE, "abort_all_requests": False}
        client.ask("POST", "/update_weight_version", order, timeout=timeout)

    def version(self, client: Client, timeout: float) -> str | None:
        return str(self._info(client, timeout).get("weight_version"))  # "default" before any weights came

    def load(self, client: Client, folder: Path, version: int, adapter: bool, owner: Owner, timeout: float) -> None:
        assert not adapter, "checked with the settings"
        self.claim(client, owner, timeout)
        order = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": owner.label(version),
            "flush_cache": True,  # what older weights computed of a prompt
        }
        told, _ = client.ask("POST", "/update_weights_from_disk", order, timeout=timeout)
        if not isinstance(told, dict) or told.get("success") is not True:
            raise Garbage(f"it did not apply weights {version}: {told}")
        self._claimed = True

    def sample(self, client: Client, question: Question, timeout: float) -> tuple[list[Answer], str | None]:
        reply, _ = client.ask("POST", "/generate", generate_body(question), timeout=timeout)
        return answers_of(reply)

    def sleep(self, client: Client, timeout: float) -> None:
        if self._sleeps:
            client.ask("POST", "/release_memory_occupation", {}, timeout=timeout)

    def wake(self, client: Client, timeout: float) -> bool:
        if self._sleeps:
            client.ask("POST", "/resume_memory_occupation", {}, timeout=timeout)
        return self._sleeps  # what it held of the weights is gone

    def _info(self, client: Client, timeout: float) -> dict[str, Any]:
        told, _ = client.ask("GET", "/model_info", timeout=timeout)
        if not isinstance(told, dict):
            raise Garbage(f"/model_info: {told}")
        return told


def generate_body(question: Question) -> dict[str, Any]:
    """Return what /generate is asked: every sample by itself, since samples of one request would share its seed."""
    sampling, request = question.sampling, question.request
    shared = {
        "max_new_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k and not sampling.greedy else -1,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(question.end_ids),  # which it does not look at with ignore_eos
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    return {
        "input_ids": [list(request.tokens)] * request.n,
        "sampling_params": [{**shared, "sampling_seed": request.seed + i} for i in range(request.n)],
        "return_logprob": True,
    }


def answers_of(reply: Any) -> tuple[list[Answer], str | None]:
    """Read the samples of an answer to /generate, and which weights drew them; None where that is not one version.

    Raises:
        Garbage: it is built otherwise.
    """
    versions: set[str] = set()
    answers = []
    try:
        for sample in reply:
            told = sample["meta_info"]
            spans = told.get("weight_versions") or [{"version": told["weight_version"]}]
            versions |= {str(span["version"]) for span in spans}
            ended = told["finish_reason"]["type"]
            if ended not in ("stop", "length"):
                raise Garbage(f"a sample was broken off: {told['finish_reason']}")
            drawn = told["output_token_logprobs"]
            if [token for _, token, *_ in drawn] != sample["output_ids"]:
                raise Garbage("a sample's log-probs are of other tokens than its own")
            answers.append(Answer([*sample["output_ids"]], [logprob for logprob, *_ in drawn], ended == "stop"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Garbage(f"the response lacks a field, or a field has another type: {error!r}") from error
    return answers, versions.pop() if len(versions) == 1 else None


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of its command line, where a switch is there or not."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words
