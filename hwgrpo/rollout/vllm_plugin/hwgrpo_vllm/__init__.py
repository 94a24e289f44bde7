"""The part of hwgrpo that runs inside a vLLM server: new weights, and the guard of the server's door.

It must run in the server's environment, which may be much older than the trainer's (vllm-ascend 0.23 has torch 2.10):
it imports only torch and safetensors, and calls only what vLLM 0.23 to 0.33 have alike.
"""

from .guard import Guard
from .words import (
    ADAPTER,
    GROUP_ROUTE,
    LEASE,
    LIFELINE_VARIABLE,
    NO_WEIGHTS,
    OWNER_HEADER,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)
from .worker import WorkerExtension, load_weights

__all__ = [
    "ADAPTER",
    "GROUP_ROUTE",
    "LEASE",
    "LIFELINE_VARIABLE",
    "NO_WEIGHTS",
    "OWNER_HEADER",
    "TOKEN_VARIABLE",
    "VERSION_HEADER",
    "WEIGHTS_ROUTE",
    "Guard",
    "WorkerExtension",
    "load_weights",
]
