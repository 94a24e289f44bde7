"""What can be said against a rollout engine before the model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hwgrpo.rollout.server_attachment import check_running_server
from hwgrpo.rollout.sglang_server import SglangServer
from hwgrpo.rollout.vllm_server import VllmServer
from hwgrpo.rollout.vllm_settings import check_head_size

if TYPE_CHECKING:
    from hwgrpo.config import Config

DIALECTS = {"vllm_server": VllmServer, "sglang_server": SglangServer}


def check_engine(config: Config, settings: Any, *, on_host: bool, is_main: bool) -> None:
    """Check that the engine can compute the model, and that a server which is to run already does.

    Args:
        config: the run's settings.
        settings: the model's transformers configuration.
        on_host: the trainer runs on a CPU, and what it starts, too.
        is_main: ask the server; one rank does.

    Raises:
        ConfigError: the model's heads have a size that vLLM does not compute, nobody answers at `rollout.server.url`,
            or the token is missing or refused.
    """
    engine, url = config.rollout.engine, config.rollout.server.url
    if engine == "vllm" or (engine == "vllm_server" and url is None):
        check_head_size(config, settings, on_host=on_host)
    if url is not None and is_main:
        check_running_server(config, DIALECTS[engine]())
