"""A run's records: settings, machine, kernels, and notes at its start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import hwgrpo_backends
import hwgrpo_kernels
import torch
import transformers
from hwgrpo_backends.device import Device
from hwgrpo_backends.environment import profile
from packaging.requirements import Requirement

import hwgrpo
from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.schema import DataConfig, ModelConfig, RolloutConfig
from hwgrpo.data.prompts import dataset_notes, overlong_note
from hwgrpo.rollout.engine_kind import unmatched_filters
from hwgrpo.support.free_cores import FreeCoreThreads
from hwgrpo.support.run_files import read_whole, write_whole
from hwgrpo.training.code_files import checksums
from hwgrpo.training.model_setup import Models
from hwgrpo.training.policy.auto_settings import choose_strategy
from hwgrpo.training.resume import LockedFolder
from hwgrpo.training.startup_checks import Prompts
from hwgrpo.training.strategies.strategy import Strategy

ENVIRONMENT = "environment.json"


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
    folder: LockedFolder,
    config: Config,
    device: Device,
    total_steps: int,
    models: Models,
    data: Prompts,
    strategy: Strategy,
    template_date: str | None,
    notes: Sequence[str],
    resumes: Sequence[Mapping[str, Any]],
) -> None:
    """Write config.yaml, and environment.json: the run's machine, versions, variables, data, and starts.

    Args:
        folder: the run's folder.
        config: the settings, with the user's own paths.
        device: rank 0's device.
        total_steps: steps of the run.
        models, data: those of the run.
        strategy: connects the ranks.
        template_date: the date that chat templates write.
        notes: what has changed since the checkpoint that this start resumes from.
        resumes: records of `resume_check`, of this start and those before it.
    """
    path = folder.path / ENVIRONMENT
    earlier = _earlier_starts(path, folder.start) if folder.checkpoint is not None else []
    start = {
        "step": folder.start,
        "checkpoint": None if folder.checkpoint is None else str(folder.checkpoint.folder),
        "notes": [note for note in notes if folder.lock is None or note != folder.lock.note],
        "device": device.name,
        "ranks": strategy.world_size,
        "torch": torch.__version__,
    }
    fingerprints = {"train": data.training.fingerprint} | (
        {} if data.validation is None else {"validation": data.validation.fingerprint}
    )
    write_whole(folder.path / "config.yaml", to_yaml(config))
    environment = {
        "hwgrpo": hwgrpo.__version__,
        "source_sha256": _source_digest(),
        "backend": device.backend.name,
        "device": device.name,
        "arch": device.arch,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "packages": _package_versions(),
        "dtype": _named(models.policy.compute_dtype),
        "ranks": strategy.world_size,
        "strategy": choose_strategy(config.trainer.strategy),
        "variables": {
            s.name: {"value": s.value, "set by": "user" if s.kept else "hwgrpo"}
            for s in profile(device.backend, "train", deterministic=config.trainer.deterministic)
        },
        "attention": {
            "selected": models.fused.attention.name,
            "skipped": dict(models.fused.attention.skipped),
            **({"kernels": models.fused.attention.kernels} if models.fused.attention.kernels else {}),
        },
        "fused_modules": models.fused.record,
        "total_steps": total_steps,
        "template_date": template_date,
        "data": {name: dict(fingerprint) for name, fingerprint in fingerprints.items()},
        "code": checksums(config),
        "starts": [*earlier, start],
        "resumes": list(resumes),
        **strategy.record,
    }
    write_whole(path, json.dumps(environment, indent=1))


def _earlier_starts(path: Path, step: int) -> list[Any]:
    """Return the starts that environment.json has of a run that resumes after a step."""
    try:
        starts = json.loads(read_whole(path))["starts"]
        return [each for each in starts if each["step"] <= step]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return []  # an older version wrote none, and a checkpoint of another run has no file here


def _source_digest() -> str:
    """Return a hash of the Python files of this project's packages, which a version does not distinguish."""
    digest = hashlib.sha256()
    for package in (hwgrpo, hwgrpo_backends, hwgrpo_kernels):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _package_versions() -> dict[str, str]:
    """Return the installed packages that hwgrpo requires or can use, without those of its development."""
    versions = {}
    with contextlib.suppress(metadata.PackageNotFoundError):  # a source tree that is not installed
        for line in metadata.requires("hwgrpo") or ():
            requirement = Requirement(line)
            if re.search(r"extra == ['\"](dev|docs)['\"]", line) or requirement.name in ("torch", "transformers"):
                continue
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[requirement.name] = metadata.version(requirement.name)
    return versions


def write_kernel_selections(output: Path, rank: int) -> None:
    if rank == 0:
        write_whole(output / "kernels.json", json.dumps(hwgrpo_kernels.choices(), indent=1))


def machine_metrics(device: Device, threads: FreeCoreThreads | None) -> dict[str, float]:
    peak = device.memory().peak
    memory = {} if peak is None else {"perf/max_memory_allocated_gb": peak / 2**30}
    return memory if threads is None else memory | {"perf/threads": float(threads.threads)}
