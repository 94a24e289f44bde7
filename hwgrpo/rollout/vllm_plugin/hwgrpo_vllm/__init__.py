"""The plugin that runs inside a vLLM server: token check, ownership and weight updates.

It runs in the server's environment, which may be much older than the trainer's (vllm-ascend 0.23 has torch 2.10): it
imports only torch and safetensors, and uses only interfaces common to vLLM 0.23 to 0.33; for prompts with images those
of 0.32.
"""

from .checksum import named_digests
from .engine_images import Images, engine_prompt, logprobs_of
from .guard import Guard
from .http_protocol import (
    ADAPTER,
    GROUP_ROUTE,
    IMAGES_ROUTE,
    LEASE,
    LIFELINE_VARIABLE,
    NO_WEIGHTS,
    OWNER_HEADER,
    PROTOCOL,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from .worker import WorkerExtension, check_files, load_weights

__all__ = [
    "ADAPTER",
    "GROUP_ROUTE",
    "IMAGES_ROUTE",
    "LEASE",
    "LIFELINE_VARIABLE",
    "NO_WEIGHTS",
    "OWNER_HEADER",
    "PROTOCOL",
    "TOKEN_VARIABLE",
    "VERSION_HEADER",
    "WEIGHTS_ROUTE",
    "Guard",
    "Images",
    "WorkerExtension",
    "check_files",
    "engine_prompt",
    "load_weights",
    "logprobs_of",
    "named_digests",
]
