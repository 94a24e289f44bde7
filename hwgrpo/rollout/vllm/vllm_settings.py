"""The run's settings -> vLLM's arguments, for an engine in this process and for a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from hwgrpo.config.derived import sequences_at_once
from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin
from hwgrpo.models.layer_values import head_sizes, largest_value
from hwgrpo.models.loading import resolve_model_path
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.router import has_experts
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights, PolicyWeights, WithoutVision
from hwgrpo.rollout.shared_devices import memory_share, sleeps
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import named_digests
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.scratch import remove_stale

if TYPE_CHECKING:
    from hwgrpo_backends import Backend

    from hwgrpo.config.schema import RolloutConfig

HOST_CACHE_GB = 2.0
"""Default of `rollout.kv_cache_gb` on a CPU, in GiB: vLLM's own default uses most of the memory."""
HOST_BATCH_TOKENS = 4096
"""Limit on the tokens of one step of vLLM on a CPU."""
HOST_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention supports on a CPU (0.32)."""
HOST_HEAD_MULTIPLE = 32
MEMORY = "/dev/shm"
"""Folder of the in-memory file system."""
WEIGHTS_PREFIX, ADAPTER_PREFIX = "hwgrpo-weights-", "hwgrpo-adapter-"
"""Prefixes of the names of scratch folders in memory."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's max_lora_rank may have."""


def engine_arguments(parts: EngineParts, adapter: AdapterWeights | None) -> dict[str, Any]:
    """Return the arguments of vLLM's engine, by name.

    Args:
        parts: the factory's inputs; vLLM is assumed to run on the same kind of device as the trainer.
        adapter: the trained adapter, if any.
    """
    config = parts.config
    rollout, model = config.rollout, config.model
    on_host = parts.device.torch_device.type == "cpu"
    cache = rollout.kv_cache_gb or (HOST_CACHE_GB if on_host else None)
    arguments: dict[str, Any] = {
        "model": resolve_model_path(model.path),
        "tokenizer": resolve_model_path(model.tokenizer or model.path),
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": str(parts.compute_dtype).removeprefix("torch."),
        # The policy's weights follow, and with dummies before them none that is missing stays unnoticed. Below adapters
        # they never change, so that those of the model's folder are the policy's; nor do those of a frozen tower.
        "load_format": "dummy" if adapter is None and not keeps_tower(parts) else "auto",
        "generation_config": "vllm",
        "seed": config.trainer.seed,
        "max_model_len": rollout.max_model_len or config.data.max_prompt_tokens + rollout.max_response_tokens,
        "max_num_seqs": sequences_at_once(rollout),
        "gpu_memory_utilization": memory_share(rollout),
        "enforce_eager": on_host if rollout.enforce_eager is None else rollout.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if parts.image_sample is not None:
        arguments |= {
            "limit_mm_per_prompt": {"image": config.data.images.max_per_prompt, "video": 0},
            "mm_processor_cache_gb": 0,  # images come processed
            "mm_device_do_normalize": False,
        }
    if different := parts.different_settings(adapted=adapter is not None):
        arguments["hf_overrides"] = different
    if not on_host and sleeps(rollout, on_host=False):
        arguments["enable_sleep_mode"] = True
    if cache is not None:
        arguments["kv_cache_memory_bytes"] = int(cache * 2**30)
    if adapter is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": max_lora_rank(adapter), "max_loras": 1}
    if on_host:
        # Chunked prefill of a prompt rewinds its generator, which is not possible on a CPU (vLLM 0.32).
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(HOST_BATCH_TOKENS, arguments["max_model_len"])
    return arguments | dict(rollout.engine_kwargs)


def keeps_tower(parts: EngineParts) -> bool:
    """Return whether vLLM keeps the weights of a tower from the model's folder: it is frozen, and no sleep drops it.

    A server that runs already may have had other weights.
    """
    rollout, on_host = parts.config.rollout, parts.device.torch_device.type == "cpu"
    if rollout.server.url is not None and engine_kind(rollout).on_server:
        return False
    frozen = parts.config.model.train_vision == "none"
    dropped = sleeps(rollout, on_host=on_host) and not on_host and sleep_level(rollout, adapter=False) == 2
    return parts.image_sample is not None and frozen and not dropped


def sent_weights(parts: EngineParts) -> PolicyWeights:
    """Return the policy's weights that vLLM needs: not those of a tower that it keeps."""
    return WithoutVision(parts.weights) if keeps_tower(parts) else parts.weights


def check_head_size(rollout: RolloutConfig, path: str, settings: Any, *, on_host: bool) -> None:
    """Check that vLLM, if the run starts it, supports the model's head size.

    Args:
        rollout: settings of the engine.
        path: `model.path`.
        settings: the model's transformers configuration.
        on_host: whether it would run on a CPU; devices support every size in use.

    Raises:
        ConfigError: it does not.
    """
    text = settings.get_text_config()
    starts_vllm = engine_kind(rollout).runs_vllm and rollout.server.url is None
    if not (on_host and starts_vllm) or largest_value(text, "kv_lora_rank"):  # latent attention has no such heads
        return
    unsupported = sorted(set(head_sizes(text)) - {0, *HOST_HEAD_SIZES})
    if not unsupported:
        return
    remedy = "use rollout.engine=local, or a vLLM server on a device (rollout.server.url)"
    if path.startswith(builtin.PREFIX):
        options = [part for part in path.partition("?")[2].split("&") if part and not part.startswith("head=")]
        fitting = f"{path.partition('?')[0]}?{'&'.join([*options, f'head={HOST_HEAD_MULTIPLE}'])}"
        remedy = f"use 'model.path={fitting}' (in quotes, for the shell), or rollout.engine=local"
    raise ConfigError(
        f"rollout.engine={rollout.engine!r} with model.path={path!r}: on a CPU vLLM has no attention with heads "
        f"of size {' and '.join(map(str, unsupported))}, only of {', '.join(map(str, HOST_HEAD_SIZES))}; {remedy}"
    )


def check_sleep(rollout: RolloutConfig, path: str, settings: Any, backend: Backend) -> None:
    """Check that vLLM can sleep with the model on this device.

    Args:
        rollout: settings of the engine.
        path: `model.path`.
        settings: the model's transformers configuration.
        backend: the device family.

    Raises:
        ConfigError: it cannot.
    """
    reason = backend.no_sleep_with_experts
    if reason and has_experts(settings.get_text_config()) and sleeps(rollout, on_host=backend.is_host):
        raise ConfigError(
            f"rollout.sleep_mode={rollout.sleep_mode!r} with model.path={path!r}: {reason}; set "
            "rollout.sleep_mode=never, or give a server devices of its own (rollout.server.env)"
        )


NOT_WITH_IMAGES = {
    "mm_device_do_normalize": "vLLM would normalize pixels that the trainer has normalized",
    "speculative_config": "vLLM takes no biases of logits with it, by which no response has a token of images",
}
"""Arguments of vLLM's engine -> why not with a model that reads images."""


def check_images(rollout: RolloutConfig, path: str, settings: Any, backend: Backend) -> None:
    """Check that vLLM, if the run starts it, takes prompts with images on this device, where the model reads them.

    Args:
        rollout: settings of the engine.
        path: `model.path`.
        settings: the model's transformers configuration.
        backend: the device family.

    Raises:
        ConfigError: it does not.
    """
    if not (engine_kind(rollout).runs_vllm and reads_images(settings)):
        return
    reading = f"rollout.engine={rollout.engine!r} with model.path={path!r}, which reads images"
    if rollout.server.url is None and backend.no_images_in_vllm:
        raise ConfigError(f"{reading}: {backend.no_images_in_vllm}; use rollout.engine=local")
    for key, reason in NOT_WITH_IMAGES.items():
        if rollout.engine_kwargs.get(key):
            raise ConfigError(f"rollout.engine_kwargs.{key}: {reading}: {reason}; leave it out")


def max_lora_rank(adapter: AdapterWeights) -> int:
    """Return vLLM's max_lora_rank for an adapter.

    Raises:
        ConfigError: the adapter's rank is too large.
    """
    rank = int(adapter.settings["r"])
    max_rank = next((size for size in RANKS if size >= rank), None)
    if max_rank is None:
        raise ConfigError(f"model.lora.rank={rank} is more than vLLM serves; use at most {RANKS[-1]}")
    return max_rank


def sleep_level(rollout: RolloutConfig, adapter: bool) -> int:
    """Return the level of vLLM's sleep: 2 drops weights, all of which are sent anew; 1 keeps them in host memory.

    What is not sent is the base of an adapter, and a draft model for speculative decoding.
    """
    return 1 if adapter or "speculative_config" in rollout.engine_kwargs else 2


def write_adapter(adapter: AdapterWeights, folder: Path) -> None:
    """Write an adapter in peft's format, with checksums."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.settings)), encoding="utf-8")
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", named_digests(tensors))
    follow_umask(folder / "adapter_model.safetensors")


def shared_memory_folder() -> str | None:
    """Return the folder of the in-memory file system, or None where the system has none."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


def remove_stale_weights() -> None:
    """Remove weights and adapters that killed processes have left in memory."""
    for prefix in (WEIGHTS_PREFIX, ADAPTER_PREFIX):
        remove_stale(prefix, shared_memory_folder())
