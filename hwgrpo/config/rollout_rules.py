"""Which settings of `rollout` belong to which engine, and what an engine cannot be combined with."""

from __future__ import annotations

import dataclasses

from hwgrpo.config.schema import Config, RolloutConfig, RolloutServerConfig
from hwgrpo.errors import ConfigError

FOR_VLLM = (
    "gpu_memory_utilization",
    "kv_cache_gb",
    "max_model_len",
    "enforce_eager",
    "tensor_parallel_size",
    "engine_kwargs",
)
"""Settings of `rollout` that the local engine has no use for."""
ON_SERVERS = ("vllm_server", "sglang_server")
"""Engines that are processes of their own."""
OF_OWN_SERVER = ("python", "host", "port", "env")
"""Settings of `rollout.server` that say how a server is started."""
OF_RUNNING_SERVER = ("wait_for_owner", "take_over")
"""Settings of `rollout.server` that say what happens to another run on a server."""


def check_rollout(config: Config) -> None:
    """Check that the engine has a use for each setting of `rollout`, and for the policy's adapters.

    Raises:
        ConfigError: the first setting found that it has none for, with the remedy.
    """
    r, fresh = config.rollout, RolloutConfig()
    if r.engine == "local":
        for name in FOR_VLLM:
            if getattr(r, name) != getattr(fresh, name):
                raise ConfigError(
                    f"rollout.{name}={getattr(r, name)!r} has no effect with rollout.engine='local'; it "
                    "belongs to vllm and servers"
                )
    if r.engine in ("vllm", *ON_SERVERS) and r.graphs:
        raise ConfigError(
            f"rollout.graphs=true has no effect with rollout.engine={r.engine!r}, which records graphs by itself, "
            "see rollout.enforce_eager"
        )
    if r.engine == "sglang_server":
        _check_sglang(config)
    if r.engine == "vllm" and r.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={r.tensor_parallel_size} with rollout.engine='vllm': in the training "
            "process every rank has an engine of its own; use rollout.engine=vllm_server"
        )
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    if r.max_model_len is not None and r.max_model_len < longest:
        raise ConfigError(
            f"rollout.max_model_len={r.max_model_len} is smaller than a sequence can be (data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_response_tokens={r.max_response_tokens}); use at least "
            f"{longest}, or leave it out"
        )
    _check_server(r)
    lora = config.model.lora
    if r.server.transfer == "group" and (lora.rank or lora.adapter):
        raise ConfigError(
            f"rollout.server.transfer='group' with model.lora.rank={lora.rank}, model.lora.adapter={lora.adapter!r}: "
            "an adapter goes to the server through a folder; leave rollout.server.transfer out"
        )


def _check_sglang(config: Config) -> None:
    r, lora = config.rollout, config.model.lora
    if lora.rank or lora.adapter:
        raise ConfigError(
            f"rollout.engine='sglang_server' with model.lora.rank={lora.rank}, model.lora.adapter={lora.adapter!r}: "
            "it gets whole models only; use rollout.engine=vllm_server, vllm or local"
        )
    if r.kv_cache_gb is not None:
        raise ConfigError(
            f"rollout.kv_cache_gb={r.kv_cache_gb} has no effect with rollout.engine='sglang_server'; set "
            "rollout.gpu_memory_utilization, or rollout.engine_kwargs={max_total_tokens: ...}"
        )
    if r.server.transfer == "group":
        raise ConfigError(
            "rollout.server.transfer='group' with rollout.engine='sglang_server': its weights go through a folder; "
            "leave it out"
        )


def _check_server(rollout: RolloutConfig) -> None:
    server, fresh = rollout.server, RolloutServerConfig()
    for field in dataclasses.fields(server):
        value = getattr(server, field.name)
        if rollout.engine not in ON_SERVERS and value != getattr(fresh, field.name):
            raise ConfigError(
                f"rollout.server.{field.name}={value!r} has no effect with rollout.engine={rollout.engine!r}; it "
                f"belongs to {' and '.join(ON_SERVERS)}"
            )
        if server.url is not None and field.name in OF_OWN_SERVER and value != getattr(fresh, field.name):
            raise ConfigError(
                f"rollout.server.{field.name}={value!r} has no effect with rollout.server.url={server.url!r}: that "
                "server runs already; leave one of them out"
            )
        if server.url is None and field.name in OF_RUNNING_SERVER and value != getattr(fresh, field.name):
            raise ConfigError(
                f"rollout.server.{field.name}={value!r} has no effect without rollout.server.url: no other run uses "
                "the server that this one starts; leave it out"
            )
    if server.transfer == "group" and server.weights_dir is not None:
        raise ConfigError(
            f"rollout.server.weights_dir={server.weights_dir!r} has no effect with rollout.server.transfer='group'; "
            "leave one of them out"
        )
    if server.url is not None and not server.url.startswith(("http://", "https://")):
        raise ConfigError(f"rollout.server.url={server.url!r} must begin with http:// or https://")
