"""A full memory as one message: in what stage, of which device, and which settings to lower."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.errors import CheckpointError, RunError
from hwgrpo.models.lora import uses_lora
from hwgrpo.terminal_width import format_bytes
from hwgrpo.training.checkpoint import restore
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.update.token_budget import read_saved_budget

LOADING, SAVING = "load", "save"
"""Stages outside a step."""

STAGES = {
    LOADING: "putting the model together",
    SAVING: "saving the final model",
    "gen": "generating",
    "testing": "generating for validation",
    "old_log_prob": "scoring with the policy",
    "ref": "scoring with the reference model",
    "update_actor": "updating the policy",
    "sync": "handing new weights to the rollout engine",
}
"""What the stages that use the device are called where a person reads it."""


@contextmanager
def explain_out_of_memory(config: Config, device: Device, stage: Callable[[], str | None]) -> Iterator[None]:
    """Turn running out of memory within the block into an error that says where, how full, and what to lower.

    Args:
        config: the run's settings.
        device: of this process.
        stage: returns the stage that failed; None where none was under way.

    Raises:
        RunError: memory ran out. Everything else passes as it is.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not device.is_oom(error):
            raise
        raise RunError(_message(config, device, stage(), error)) from error


def _message(config: Config, device: Device, stage: str | None, error: BaseException) -> str:
    doing = STAGES.get(stage or "", f"in stage {stage}" if stage else "between two stages")
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    # Not verified: that would read all of it on each rank that fails, and the others wait until this one has ended.
    last = restore.newest_step(Path(config.trainer.output_dir) / "checkpoints")
    goes_on = f"goes on after step {last}" if last is not None else "restarts from step 0 (no checkpoint yet)"
    smaller = None
    with contextlib.suppress(CheckpointError):  # the next start says what is wrong with it
        smaller = read_saved_budget(Path(config.trainer.output_dir))
    if smaller is not None and smaller < micro_batch_tokens(config, device.torch_device):
        goes_on = f"begins with {smaller} tokens per micro-batch, which it has found, and {goes_on}"
    return (
        f"out of memory while {doing}, on {device.torch_device} ({device.name}; {_figures(device)}): {said}\n"
        f"  lower {'; '.join(_remedies(config, device, stage))}\n"
        f"  Started again, the run {goes_on}."
    )


def _figures(device: Device) -> str:
    memory = device.memory()
    if memory.total is None or memory.free is None or memory.peak is None or memory.allocated is None:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"this process held {format_bytes(held)} of host memory at the most"
    return (
        f"{format_bytes(memory.total)} in all, {format_bytes(memory.free)} free, "
        f"{format_bytes(memory.allocated)} in this run's tensors, {format_bytes(memory.peak)} at the most"
    )


def _remedies(config: Config, device: Device, stage: str | None) -> list[str]:
    """Return the settings that make the stage smaller, with their values; what helps most comes first."""
    r, remedies = config.rollout, []
    if stage in ("gen", "testing"):
        remedies += [
            f"rollout.max_sequences (now {r.max_sequences}), which changes no numbers but the speed",
            f"rollout.max_response_tokens (now {r.max_response_tokens})",
        ]
    elif stage not in (LOADING, SAVING):
        tokens = micro_batch_tokens(config, device.torch_device)
        remedies.append(f"trainer.tokens_per_micro_batch (now {tokens}), which changes no numbers but the speed")
        if not config.model.gradient_checkpointing:
            remedies.append("the activations kept, by model.gradient_checkpointing=true")
    if not uses_lora(config.model.lora):
        remedies.append("the optimizer's share, by training adapters (model.lora.rank=16)")
    if config.algorithm.kl.coef and not uses_lora(config.model.lora):
        remedies.append("the number of models, by algorithm.kl.coef=0, which loads no reference model")
    return remedies or ["the size of the model (model.path)"]
