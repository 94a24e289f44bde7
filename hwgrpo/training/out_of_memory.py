"""Out-of-memory errors with the stage, the device's memory, and the settings to lower."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.config.derived import sequences_at_once
from hwgrpo.errors import CheckpointError, RunError
from hwgrpo.models.lora import uses_lora
from hwgrpo.support.terminal_width import format_bytes
from hwgrpo.training.checkpoint import restore
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.update.token_budget import read_saved_budget

LOADING, SAVING = "load", "final save"
"""Stages outside a step."""

STAGES = {
    LOADING: "loading the model",
    SAVING: "saving the final model",
    "gen": "generating",
    "testing": "generating for validation",
    "old_log_prob": "scoring with the policy",
    "ref": "scoring with the reference model",
    "update_actor": "updating the policy",
    "sync": "handing new weights to the rollout engine",
    "save": "saving a checkpoint",
}
"""Stage -> its description in messages, for stages that use the device."""


@contextmanager
def explain_out_of_memory(config: Config, device: Device, stage: Callable[[], str | None]) -> Iterator[None]:
    """Turn an out-of-memory error in the block into one with stage, memory use and settings to lower.

    Args:
        config: the run's settings.
        device: this process's device.
        stage: returns the stage that failed; None between stages.

    Raises:
        RunError: memory ran out. Other errors propagate unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not device.is_oom(error):
            raise
        raise RunError(_message(config, device, stage(), error)) from error


def _message(config: Config, device: Device, stage: str | None, error: BaseException) -> str:
    doing = STAGES.get(stage or "", f"in stage {stage}" if stage else "between two stages")
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    # Not verified: each failing rank would read all of it, while the others wait for this process to end.
    last = restore.newest_step(Path(config.trainer.output_dir) / "checkpoints")
    next_start = f"resumes after step {last}" if last is not None else "restarts from step 0 (no checkpoint yet)"
    smaller = None
    with contextlib.suppress(CheckpointError):  # the next start reports a damaged file
        smaller = read_saved_budget(Path(config.trainer.output_dir))
    if smaller is not None and smaller < micro_batch_tokens(config, device.torch_device):
        next_start = f"uses {smaller} tokens per micro-batch, saved before this error, and {next_start}"
    return (
        f"out of memory while {doing}, on {device.torch_device} ({device.name}; {_figures(device)}): {first_line}\n"
        f"  lower {'; '.join(_remedies(config, device, stage))}\n"
        f"  Started again, the run {next_start}."
    )


def _figures(device: Device) -> str:
    memory = device.memory()
    if memory.total is None or memory.free is None or memory.peak is None or memory.allocated is None:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"this process used up to {format_bytes(held)} of host memory"
    return (
        f"{format_bytes(memory.total)} in total, {format_bytes(memory.free)} free, "
        f"{format_bytes(memory.allocated)} in this run's tensors, {format_bytes(memory.peak)} at peak"
    )


def _remedies(config: Config, device: Device, stage: str | None) -> list[str]:
    """Return the settings that reduce the stage's memory, with their values; the most effective first."""
    r, remedies = config.rollout, []
    lora = uses_lora(config.model.lora)
    if stage in ("gen", "testing"):
        remedies += [
            f"rollout.max_sequences (now {sequences_at_once(r)}), which changes only the speed",
            f"rollout.max_response_tokens (now {r.max_response_tokens})",
        ]
    elif stage == "sync" and r.engine == "vllm":
        remedies.append("the engine's share, by rollout.gpu_memory_utilization or rollout.kv_cache_gb")
    elif stage not in (LOADING, SAVING, "save", "sync"):
        tokens = micro_batch_tokens(config, device.torch_device)
        remedies.append(f"trainer.tokens_per_micro_batch (now {tokens}), which changes only the speed")
        if config.trainer.strategy == "fsdp2" and config.trainer.fsdp2.sync_every == "update":
            remedies.append("the full weights and gradients, by trainer.fsdp2.sync_every=micro_batch")
        if config.trainer.strategy == "deepspeed" and config.trainer.deepspeed.sync_every == "update":
            remedies.append("the full gradients, by trainer.deepspeed.sync_every=micro_batch")
        if config.trainer.offload == "optimizer":
            remedies.append("the gradients, by trainer.offload=gradients")
        if not config.model.gradient_checkpointing:
            remedies.append("the stored activations, by model.gradient_checkpointing=true")
    if not lora and config.trainer.strategy != "deepspeed":
        if config.optim.name == "adamw":
            remedies.append("the optimizer states, by optim.name=adamw_8bit")
        if config.trainer.offload == "none" and config.optim.name != "muon":
            remedies.append("the optimizer states on an accelerator, by trainer.offload=optimizer")
    if config.trainer.strategy in ("auto", "ddp"):
        remedies.append("each device's share, by trainer.strategy=fsdp2 on several devices")
    if not lora:
        remedies.append("gradients and optimizer states, by training adapters (model.lora.rank=16)")
    elif config.model.quantize == "none":
        remedies.append("the base model's weights, by model.quantize=nf4")
    if config.algorithm.kl.coef and not lora:
        remedies.append("the number of models, by algorithm.kl.coef=0, which needs no reference model")
    return remedies or ["the size of the model (model.path)"]
