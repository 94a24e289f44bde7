"""Settings left at `auto`: what they become on this backend, and a clear word where a wish cannot be met."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.catalog import LAYOUTS
from hwgrpo.config import Config
from hwgrpo.config.derived import longest_share, ranks_per_sequence
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import ACCEPT_MASKS, is_fused, reason_against, reason_model_cannot_use
from hwgrpo.models.loading import load_model_config
from hwgrpo.models.windows import described, windows_below
from hwgrpo.training.policy.layouts import BRANCHED, Layout

CPU_MICRO_BATCH, ACCELERATOR_MICRO_BATCH = 4096, 16384
"""Tokens per micro-batch. Activations of more stay in no CPU's caches: 16384 take 1.1 to 1.4 times as long."""


@dataclass(frozen=True)
class AttentionChoice:
    """The attention implementation taken, and why the backend's preferences before it were not."""

    name: str
    """Transformers' name."""
    is_fused: bool = False
    """It is a fused module of the device, put into the model once that is there; until then `loaded_as` computes."""
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def loaded_as(self) -> str:
        """What the model is loaded with."""
        return "sdpa" if self.is_fused else self.name

    @property
    def line(self) -> str:
        """One line for people: `attention sdpa (flash_attention_2: its package is not installed)`."""
        notes = "; ".join(f"{name}: {reason}" for name, reason in self.passed_over)
        return f"attention {self.name}" + (f" ({notes})" if notes else "")


def choose_strategy(config: Config) -> str:
    """Return the strategy: ddp where a launcher started several processes, else single."""
    if config.trainer.strategy != "auto":
        return config.trainer.strategy
    return "ddp" if int(os.environ.get("WORLD_SIZE", 1)) > 1 or dist.is_torchelastic_launched() else "single"


def choose_dtype(config: Config, device: Device) -> torch.dtype:
    """Return the compute dtype.

    Raises:
        ConfigError: the device has no real support for the dtype asked for.
    """
    # fp16 gradients underflow without loss scaling, which this trainer does not do
    able = tuple(dtype for dtype in device.compute_dtypes if dtype != torch.float16)
    if config.model.dtype == "auto":
        return able[0]
    wanted: torch.dtype = getattr(torch, config.model.dtype)
    if wanted not in able:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in able)
        raise ConfigError(
            f"model.dtype={config.model.dtype!r}: {device.name} cannot train in it; choose auto or one of: {names}"
        )
    return wanted


def dtype_note(config: Config, device: Device) -> str | None:
    """Say what `auto` had to leave out: chips without bf16 compute in fp16, which is not trained in. Else None."""
    first = device.compute_dtypes[0]
    if config.model.dtype != "auto" or first != torch.float16:
        return None
    taken = str(choose_dtype(config, device)).removeprefix("torch.")
    return (
        f"model.dtype=auto is {taken}: {device.name} has no bfloat16, and float16, its fast dtype, would need loss "
        "scaling, which is not built in"
    )


def choose_attention(
    config: Config, backend: Backend, dtype: torch.dtype, model_config: Any, arch: str | None = None
) -> AttentionChoice:
    """Return the attention implementation: the backend's first that runs here and is right for the model.

    Args:
        config: the run's settings.
        backend: the chosen device family.
        dtype: compute dtype.
        model_config: the transformers configuration of the model.
        arch: of the device; None where there is none to ask.

    Raises:
        ConfigError: the one asked for cannot run here, or would not compute what the model defines.
    """

    wanted = config.model.attention

    def obstacle(name: str) -> str | None:
        fused = is_fused(name, backend)
        if name not in ACCEPT_MASKS and not fused and ranks_per_sequence(config) > 1:
            return (
                "ranks that share sequences (trainer.sequence_parallel_size, trainer.tensor_parallel_size) need one "
                "that takes masks as sdpa does"
            )
        if name not in ACCEPT_MASKS and not fused and config.model.layout not in ("auto", "padded"):
            return f"the {config.model.layout} layout needs an attention that accepts a mask"
        return reason_model_cannot_use("sdpa" if fused else name, model_config) or reason_against(
            name, backend, arch, dtype, explicit=name == wanted
        )

    if wanted == "auto":
        passed_over = []
        for name in backend.attention:
            reason = obstacle(name)
            if reason is None:
                return AttentionChoice(name, is_fused(name, backend), tuple(passed_over))
            passed_over.append((name, reason))
        return AttentionChoice("eager", passed_over=tuple(passed_over))
    reason = obstacle(wanted)
    if reason:
        raise ConfigError(
            f"model.attention={wanted!r}: {reason}; use model.attention="
            f"{'eager' if reason_model_cannot_use('sdpa', model_config) else 'sdpa'}"
        )
    return AttentionChoice(wanted, is_fused(wanted, backend))


def attention_of(config: Config, device: Device) -> AttentionChoice:
    """Return the attention implementation for the model and the compute dtype that the run has on this device."""
    return choose_attention(
        config, device.backend, choose_dtype(config, device), load_model_config(config.model), device.arch
    )


def choose_layout(config: Config, model_config: Any, attention: str) -> Layout:
    """Return the layout of micro-batches: `grouped` where rows of several sequences are possible, else `padded`.

    Ranks that share sequences do so because these are long: then `padded`, the one without masks, is best.

    Without `sdpa`, which branches are built on, grouped means the form with a dense mask.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: what the model is loaded with, as transformers names it; a device's fused attention, which takes what
            sdpa takes, comes later.

    Raises:
        ConfigError: the one asked for puts several sequences into a row, and the model's layers look at more than its
            mask: a window shorter than a sequence can be, or a state that runs on from one sequence into the next.
    """
    text = model_config.get_text_config()
    states = layers_beyond_attention(text)
    window = windows_in_reach(config, model_config)
    wanted = config.model.layout
    if wanted == "auto":
        wanted = "grouped" if why_padded(config, model_config, attention) is None else "padded"
    if wanted == "grouped" and attention != "sdpa":
        wanted = "grouped_masked"
    obstacles = (
        (", ".join(states), wanted != "padded"),
        (_shorter(window), bool(window) and wanted in ("packed", "grouped_masked")),
    )
    for what, applies in obstacles:
        if what and applies:
            raise ConfigError(
                f"model.layout={config.model.layout!r} with a {text.model_type} model ({what}): sequences in one row "
                "would see each other; use model.layout=padded"
            )
    return BRANCHED if window and wanted == "grouped" else LAYOUTS.load(wanted)


def why_padded(config: Config, model_config: Any, attention: str) -> str | None:
    """Return why `model.layout=auto` is padded before anything is tried on the model, or None.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: what the model is loaded with.
    """
    if config.model.layout != "auto":
        return None
    text = model_config.get_text_config()
    states = layers_beyond_attention(text)
    window = windows_in_reach(config, model_config)
    if states:
        return f"a {text.model_type} model has layers in which no mask separates sequences ({', '.join(states)})"
    if ranks_per_sequence(config) > 1:
        return "a mask over full rows would be as large on each of the ranks that share them"
    if attention not in ACCEPT_MASKS:
        return f"attention {attention} takes no mask"
    if window and attention != "sdpa":
        return f"{_shorter(window)}, and attention {attention} cannot be given windows without a mask over the row"
    return None


def layout_note(config: Config, model_config: Any, attention: str) -> str | None:
    """Return the line that names a fall-back to padded rows, and why; None where there is none."""
    reason = why_padded(config, model_config, attention)
    return None if reason is None else f"layout padded (one sequence per row): {reason}"


def micro_batch_tokens(config: Config, device: torch.device) -> int:
    """Return the token budget of a micro-batch: the one configured, else what suits the device."""
    if config.trainer.tokens_per_micro_batch is not None:
        return config.trainer.tokens_per_micro_batch
    return max(longest_share(config), CPU_MICRO_BATCH if device.type == "cpu" else ACCELERATOR_MICRO_BATCH)


def windows_in_reach(config: Config, model_config: Any) -> dict[str, int]:
    """Return the windows of a model's attention that are shorter than a sequence can be, in tokens by setting."""
    return windows_below(model_config, config.data.max_prompt_tokens + config.rollout.max_response_tokens)


def _shorter(windows: Mapping[str, int]) -> str:
    return f"{described(windows)} is shorter than a sequence can be"


def layers_beyond_attention(text: Any) -> list[str]:
    """Return the kinds of layers in which a token meets the ones before it by more than masked attention."""
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    return sorted(kinds) or (["no attention"] if getattr(text, "is_attention_free", False) else [])
