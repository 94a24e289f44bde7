"""Rollout engines: what turns prompts into sampled responses, behind one protocol.

An engine is a callable that takes `parts.EngineParts` and returns an `engine.Engine`; a package adds one by
`ENGINES.register(name)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwgrpo.config.schema import Config

CHECKS = {
    "sglang_server": "hwgrpo.rollout.server.attachment:check_sglang_server",
    "vllm": "hwgrpo.rollout.vllm.engine:check_installed",
    "vllm_server": "hwgrpo.rollout.server.attachment:check_vllm_server",
}
"""Engine -> function that checks, before anything is loaded, that this machine has what it needs."""
DIALECTS = {
    "sglang_server": "hwgrpo.rollout.server.sglang:SglangServer",
    "vllm_server": "hwgrpo.rollout.server.vllm:VllmServer",
}
"""Engine -> how its servers are spoken to."""


def check_engine(config: Config) -> None:
    """Check that this machine has what the rollout engine needs.

    Raises:
        ConfigError: it lacks something; the message says what to install or set.
    """
    module, _, function = CHECKS.get(config.rollout.engine, "").partition(":")
    if module:
        getattr(importlib.import_module(module), function)(config)


def check_running_server(config: Config) -> None:
    """Check that a server answers at `rollout.server.url`, where that is set, and takes the token.

    Raises:
        ConfigError: it does not.
    """
    module, _, dialect = DIALECTS.get(config.rollout.engine, "").partition(":")
    if module and config.rollout.server.url is not None:
        attachment = importlib.import_module("hwgrpo.rollout.server.attachment")
        attachment.check_running_server(config, getattr(importlib.import_module(module), dialect)())
