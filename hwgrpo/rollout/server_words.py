"""What is said to a vLLM server: how it is started, what it is asked, and how its answers are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.rollout import vllm_plugin
from hwgrpo.rollout.engine import Sampling
from hwgrpo.rollout.http_client import Garbage
from hwgrpo.rollout.requests import Answer, Request
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import LIFELINE_VARIABLE, TOKEN_VARIABLE

PLUGIN = Path(vllm_plugin.__file__).parent
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Weights that vllm-ascend has reformatted cannot be exchanged; without effect elsewhere.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}


def environment(token: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server of ours.

    Args:
        token: that requests must carry.
        settings: `rollout.server.env`, which win over what is inherited.
    """
    # The trainer's own paths would bring its packages into the server's environment.
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    # It is no rank of the training's process group.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    defaults = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own = {"PYTHONPATH": str(PLUGIN), TOKEN_VARIABLE: token, LIFELINE_VARIABLE: "1"}
    return defaults | inherited | ENVIRONMENT | dict(settings) | own


def completion_body(
    model: str, version: int, request: Request, sampling: Sampling, end_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Return what /v1/completions is asked.

    Args:
        model: name under which the server has it.
        version: of the weights.
        request: one prompt and its samples.
        sampling: how tokens are drawn.
        end_ids: tokens that end a response.
    """
    return {
        "model": model,
        "prompt": list(request.tokens),
        "n": request.n,
        "seed": request.seed,
        "max_tokens": sampling.max_response_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,  # it is among the stop tokens
        "logprobs": 0,
        "return_token_ids": True,
        # keeps what older weights computed of a prompt from being taken for it
        "cache_salt": f"weights {version}",
    }


def answers_of(reply: Any) -> list[Answer]:
    """Read the samples of an answer to /v1/completions.

    Raises:
        Garbage: it is built otherwise.
    """
    try:
        return [
            Answer([*choice["token_ids"]], [*choice["logprobs"]["token_logprobs"]], choice["finish_reason"] == "stop")
            for choice in sorted(reply["choices"], key=lambda choice: choice["index"])
        ]
    except (KeyError, TypeError) as error:
        raise Garbage(f"the answer lacks what an answer has: {error!r}") from error


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's arguments as words of its command line; None leaves one out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
