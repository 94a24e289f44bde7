"""Rollout engines: what turns prompts into sampled responses, behind one protocol.

An engine is a callable that takes `engine_parts.EngineParts` and returns an `engine.Engine`, under a name of
`hwgrpo.catalog.ENGINES`.

engine.py         the protocol
engine_parts.py   what an engine is made from
local/            the training model samples
vllm/             vLLM in the training process
server/           vLLM and SGLang as servers
vllm_plugin/, sglang_plugin/   what runs inside those servers
requests.py       what engines outside this project's own code are asked for
stopping.py       when a response ends
counter_rng.py    random numbers by seed, prompt, sample and position
weights.py        how an engine gets the policy's weights, whatever shards them
pause_gate.py     a thread that generates and one that exchanges weights, one at a time
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
