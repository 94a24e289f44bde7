"""A run's records: settings, machine, kernels, and notes at its start."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import hwgrpo_kernels
import torch
import transformers
from hwgrpo_backends.device import Device
from hwgrpo_backends.environment import profile

import hwgrpo
from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.schema import DataConfig, ModelConfig, RolloutConfig
from hwgrpo.data.prompts import dataset_notes, overlong_note
from hwgrpo.rollout.engine_kind import unmatched_filters
from hwgrpo.support.run_files import write_whole
from hwgrpo.training.model_setup import Models
from hwgrpo.training.module_fusion import Fused
from hwgrpo.training.startup_checks import Prompts
from hwgrpo.training.strategies.strategy import Strategy


def prompt_notes(config: DataConfig, data: Prompts) -> Iterator[str]:
    """Yield notes on the prompts: their template, and prompts dropped or truncated."""
    for name, prompts in (("training", data.training), ("validation", data.validation)):
        yield from dataset_notes(name, prompts)
        if prompts is not None:
            yield from filter(None, (overlong_note(name, prompts, config.max_prompt_tokens),))


def frozen_dtype_note(model: ModelConfig, models: Models) -> str | None:
    """Return why frozen matrices take twice the memory, where `model.lora.base_dtype=auto` keeps them in fp32."""
    compute = models.policy.compute_dtype
    quantized = model.quantize != "none"
    if quantized or model.lora.base_dtype != "auto" or models.frozen_dtype in (None, compute):
        return None
    return (
        f"the frozen base model stays in float32 and is copied to sample with, since {_named(compute)} would round its "
        "values; model.lora.base_dtype=bfloat16 rounds them"
    )


def filters_note(config: Config, models: Models) -> str | None:
    """Return a line where rollout and trainer normalize over different tokens."""
    reason = unmatched_filters(config.rollout, models.policy.head.softcap)
    return reason and (
        f"the trainer's log-probs are over all tokens, not only those that top_k, top_p and min_p keep: {reason}. "
        "The gap in rollout_corr/* is large and rollout.guard does not watch it; "
        "algorithm.correction.name=token_truncate weighs tokens by it"
    )


def partial_note(rollout: RolloutConfig) -> str | None:
    """Return a line where the numbers depend on the speed of the machine."""
    if not rollout.partial:
        return None
    return (
        "rollout.partial=true: at which token the weights change depends on the speed of the machine; neither a second "
        "run nor a resumed one gives the same numbers"
    )


def start_summary(model: ModelConfig, device: Device, models: Models, data: Prompts, start: int) -> str:
    """Return a line with device, trainable parameters, number of prompts, and first step."""
    quantize = model.quantize
    held = _named(models.frozen_dtype) if models.frozen_dtype and quantize == "none" else quantize
    frozen = f"frozen matrices in {held}, " if models.frozen_dtype else ""
    return (
        f"{device.name} ({device.backend.name}, {_named(models.policy.compute_dtype)}), "
        f"{models.trainable:,} trainable parameters, {frozen}"
        f"{len(data.training):,} prompts, {'continuing after' if start else 'starting from'} step {start}"
    )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_run_record(
    output: Path,
    config: Config,
    device: Device,
    total_steps: int,
    fused: Fused,
    strategy: Strategy,
    template_date: str | None,
) -> None:
    """Write config.yaml, and environment.json: the run's machine, versions, variables, and its templates' date."""
    write_whole(output / "config.yaml", to_yaml(config))
    environment = {
        "hwgrpo": hwgrpo.__version__,
        "backend": device.backend.name,
        "device": device.name,
        "arch": device.arch,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "variables": {
            s.name: {"value": s.value, "set by": "user" if s.kept else "hwgrpo"}
            for s in profile(device.backend, "train", deterministic=config.trainer.deterministic)
        },
        "attention": {"selected": fused.attention.name, "skipped": dict(fused.attention.skipped)},
        "fused_modules": fused.record,
        "total_steps": total_steps,
        "template_date": template_date,
        **strategy.record,
    }
    write_whole(output / "environment.json", json.dumps(environment, indent=1))


def write_kernel_selections(output: Path, rank: int) -> None:
    if rank == 0:
        write_whole(output / "kernels.json", json.dumps(hwgrpo_kernels.choices(), indent=1))


def memory_metrics(device: Device) -> dict[str, float]:
    memory = device.memory()
    if memory.peak is None:
        return {}
    return {"perf/max_memory_allocated_gb": memory.peak / 2**30}
