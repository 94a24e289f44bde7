"""The configuration that DeepSpeed is started with: made from a run's settings, with a user's own JSON merged in.

A file may set how DeepSpeed moves its data. Values that the run's settings decide (optimizer, batch sizes, precision,
the stage itself) must be equal in it, or "auto".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.config.schema import Settings
from hwgrpo.errors import ConfigError, choice_error

BUCKET = 8_000_000
"""Elements that are reduced or gathered together at most, about as many as by ddp; DeepSpeed's own 500 million would be
2 GB of fp32."""

FREE = (
    "comms_logger",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_optimization",
)
"""Settings that a user's file may contain; none of them changes results."""

FREE_ZERO = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)
"""The same within its `zero_optimization`."""

INSTEAD = {
    "amp": "set model.dtype",
    "bf16": "set model.dtype",
    "communication_data_type": "gradients are summed in float32 in any case",
    "data_types": "set model.dtype; gradients are summed in float32 in any case",
    "fp16": "set model.dtype; float16 is not trained in",
    "gradient_accumulation_steps": "set trainer.prompts_per_update and trainer.tokens_per_micro_batch",
    "gradient_clipping": "set optim.grad_clip",
    "optimizer": "set optim.lr, optim.betas, optim.eps and optim.weight_decay",
    "scheduler": "set optim.schedule, optim.warmup_steps and optim.min_lr_ratio",
    "torch_autocast": "set model.dtype",
    "train_batch_size": "set trainer.prompts_per_update and rollout.n",
    "train_micro_batch_size_per_gpu": "set trainer.tokens_per_micro_batch",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW in any case",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's AdamW in any case",
    "zero_optimization.offload_optimizer": "set trainer.deepspeed.offload_optimizer",
    "zero_optimization.offload_param": "set trainer.deepspeed.offload_parameters",
    "zero_optimization.stage": "set trainer.deepspeed.stage",
}
"""What the run's settings decide, and which of them does."""


def deepspeed_config(config: Settings) -> dict[str, Any]:
    """Return what DeepSpeed is started with, but for precision and bucket sizes, which the model decides.

    Args:
        config: a run's settings; its `trainer.deepspeed.config` may name a JSON file.

    Raises:
        ConfigError: the file cannot be read, or contradicts the settings.
    """
    settings = config.trainer.deepspeed
    zero: dict[str, Any] = {"stage": settings.stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # each micro-batch's loss is a part of the update's sum, not of a mean
        "gradient_clipping": 0.0,  # done here, over all ranks, before the step
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if settings.config is None:
        return ours
    theirs = _read(settings.config)
    zero_theirs = theirs.pop("zero_optimization", {})
    if not isinstance(zero_theirs, dict):
        raise ConfigError(f"trainer.deepspeed.config={settings.config!r}: zero_optimization must be an object")
    free = _free(settings.config, theirs, ours, FREE, "")
    return free | ours | {"zero_optimization": _free(settings.config, zero_theirs, zero, FREE_ZERO, ZERO) | zero}


ZERO = "zero_optimization."


def with_precision(merged: Mapping[str, Any], *, half: bool, elements: int) -> dict[str, Any]:
    """Add the settings that depend on the model to a configuration.

    Args:
        merged: from `deepspeed_config`.
        half: whether forward passes use bfloat16 weights with fp32 masters.
        elements: of all trainable parameters.
    """
    bucket = min(BUCKET, elements + elements % 2)  # some of DeepSpeed's collectives need an even number
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if merged["zero_optimization"]["stage"] < 3:
        # These stages all-reduce in either case; with reduce_scatter, a copy of each bucket (DeepSpeed 0.19).
        zero["reduce_scatter"] = False
    zero |= merged["zero_optimization"]
    if not half:
        return dict(merged) | {"zero_optimization": zero}
    return dict(merged) | {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"trainer.deepspeed.config={path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"trainer.deepspeed.config={path!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"trainer.deepspeed.config={path!r} must hold one JSON object, as DeepSpeed's files do")
    return found


def _free(
    path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], allowed: tuple[str, ...], prefix: str
) -> dict[str, Any]:
    """Return the additions of a file; raise where it contradicts the run's settings."""
    free = {}
    for key, value in theirs.items():
        name = f"{prefix}{key}"
        if value == "auto":
            continue
        if name in INSTEAD:
            if not _agree(value, ours.get(key)):
                raise ConfigError(
                    f"trainer.deepspeed.config={path!r} sets {name}={json.dumps(value)}, which the run's own settings "
                    f"decide: take it out of the file; {INSTEAD[name]}"
                )
        elif key not in allowed:
            raise choice_error(f"trainer.deepspeed.config={path!r}: the key", name, [prefix + each for each in allowed])
        else:
            free[key] = value
    return free


def _agree(theirs: Any, ours: Any) -> bool:
    """Return whether a file's value agrees with the run's settings; None: it is off in them."""
    if isinstance(theirs, dict):
        if theirs.get("enabled") is False or theirs.get("device") == "none":
            return ours is None
        return isinstance(ours, dict) and all(_agree(value, ours.get(key)) for key, value in theirs.items())
    return theirs == "auto" or theirs == ours or theirs is None
