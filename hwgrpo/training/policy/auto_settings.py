"""Settings left at `auto`: select their values for this backend, or raise for unsupported ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device, has_flash_operator

from hwgrpo.catalog import LAYOUTS
from hwgrpo.config import Config
from hwgrpo.config.derived import longest_share, ranks_per_sequence
from hwgrpo.config.schema import DataConfig, RolloutConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import ACCEPT_MASKS, is_fused, reason_against, reason_model_cannot_use
from hwgrpo.models.loading import load_model_config
from hwgrpo.models.shared_prefix_masks import reason_against_heads
from hwgrpo.models.vision import attends_both_ways
from hwgrpo.models.windows import describe_windows, windows_below
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.training.policy.layouts import BRANCHED, PACKED_BRANCHED, Layout, cheaper_layout, saved_share

CPU_MICRO_BATCH, CPU_LONGEST_ROW, ACCELERATOR_MICRO_BATCH = 1024, 4096, 16384
"""Tokens per micro-batch; a CPU is as fast with 1024 as with 4096, which a prompt with its responses may fill."""


@dataclass(frozen=True)
class AttentionSelection:
    """The selected attention implementation, and why the backend's earlier preferences were skipped."""

    name: str
    """Transformers' name."""
    is_fused: bool = False
    """It is a fused module of the device, inserted after the model is loaded with `loaded_as`."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(name, reason) of each skipped implementation."""
    kernels: tuple[str, ...] = ()
    """Kernels among which sdpa chooses on the device that is here; empty where it has one, or for another name."""

    @property
    def loaded_as(self) -> str:
        """Implementation that the model is loaded with."""
        return "sdpa" if self.is_fused else self.name

    @property
    def line(self) -> str:
        """The selection as a log line: `attention sdpa by flash or math (flash_attention_2: it is not installed)`."""
        notes = "; ".join(f"{name}: {reason}" for name, reason in self.skipped)
        kernels = f" by {' or '.join(self.kernels)}" if self.kernels else ""
        return f"attention {self.name}{kernels}" + (f" ({notes})" if notes else "")


BOTH_WAYS = "the tokens of an image attend to each other both ways, and rows of several sequences only backwards"


def choose_strategy(setting: str) -> str:
    """Return the strategy: for `auto` ddp if a launcher started several processes, else single."""
    if setting != "auto":
        return setting
    return "ddp" if launched_rank().world_size > 1 or dist.is_torchelastic_launched() else "single"


def choose_dtype(setting: str, device: Device) -> torch.dtype:
    """Return the compute dtype.

    Args:
        setting: `model.dtype`.
        device: the training device.

    Raises:
        ConfigError: the device does not support training in the configured dtype.
    """
    # fp16 gradients underflow without loss scaling, which this trainer does not have
    supported = tuple(dtype for dtype in device.compute_dtypes if dtype != torch.float16)
    if setting == "auto":
        return supported[0]
    wanted: torch.dtype = getattr(torch, setting)
    if wanted not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        raise ConfigError(f"model.dtype={setting!r}: {device.name} cannot train in it; choose auto or one of: {names}")
    return wanted


def dtype_note(setting: str, device: Device) -> str | None:
    """Return a note if `auto` skipped float16, the fast dtype of chips without bfloat16; else None."""
    first = device.compute_dtypes[0]
    if setting != "auto" or first != torch.float16:
        return None
    selected = str(choose_dtype(setting, device)).removeprefix("torch.")
    return (
        f"model.dtype=auto is {selected}: {device.name} has no bfloat16, and float16, its fast dtype, would need loss "
        "scaling, which is not built in"
    )


def choose_attention(
    config: Config, backend: Backend, dtype: torch.dtype, model_config: Any, arch: str | None = None
) -> AttentionSelection:
    """Return the attention implementation: the backend's first that runs here and supports the model.

    Args:
        config: the run's settings.
        backend: the selected device family.
        dtype: compute dtype.
        model_config: the transformers configuration of the model.
        arch: architecture of the device; None if the device is not here.

    Raises:
        ConfigError: the configured one cannot run here, or does not support the model.
    """

    wanted = config.model.attention
    kernels = () if arch is None or backend.sdpa_kernels is None else backend.sdpa_kernels()

    def selection(name: str, skipped: Sequence[tuple[str, str]] = ()) -> AttentionSelection:
        of_sdpa = kernels if name == "sdpa" else ()
        return AttentionSelection(name, is_fused(name, backend), tuple(skipped), of_sdpa)

    def reason_to_skip(name: str) -> str | None:
        fused = is_fused(name, backend)
        if name not in ACCEPT_MASKS and not fused and ranks_per_sequence(config) > 1:
            return (
                "sequence and tensor parallelism (trainer.sequence_parallel_size, trainer.tensor_parallel_size) need "
                "an implementation that accepts masks as sdpa does"
            )
        if name not in ACCEPT_MASKS and not fused and config.model.layout not in ("auto", "padded"):
            return f"the {config.model.layout} layout needs an attention that accepts a mask"
        return reason_model_cannot_use("sdpa" if fused else name, model_config) or reason_against(
            name, backend, arch, dtype, explicit=name == wanted
        )

    if wanted == "auto":
        skipped = []
        for name in backend.attention:
            reason = reason_to_skip(name)
            if reason is None:
                return selection(name, skipped)
            skipped.append((name, reason))
        return selection("eager", skipped)
    reason = reason_to_skip(wanted)
    if reason:
        raise ConfigError(
            f"model.attention={wanted!r}: {reason}; use model.attention="
            f"{'eager' if reason_model_cannot_use('sdpa', model_config) else 'sdpa'}"
        )
    return selection(wanted)


def attention_of(config: Config, device: Device) -> AttentionSelection:
    """Return the attention implementation for the run's model and compute dtype on this device."""
    return choose_attention(
        config, device.backend, choose_dtype(config.model.dtype, device), load_model_config(config.model), device.arch
    )


def reason_against_lengths(config: Config, model_config: Any, dtype: torch.dtype) -> str | None:
    """Return why torch's flash kernels do not compute rows by lengths, as far as settings show; None if they may.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        dtype: compute dtype.
    """
    if dtype.itemsize != 2:
        return f"flash kernels compute in 16 bits, not in {dtype}"
    if config.trainer.deterministic:
        return "trainer.deterministic=true, and their backward adds in any order"
    if ranks_per_sequence(config) > 1:
        return "ranks share sequences"
    if getattr(model_config.get_text_config(), "v_head_dim", None):
        return "keys and values have heads of different sizes"
    return reason_against_heads(head_size(model_config))


def may_use_lengths(config: Config, model_config: Any, dtype: torch.dtype, device_type: str) -> bool:
    """Return whether rows may be computed by lengths on such devices, before a model and a device are there to test."""
    return has_flash_operator(device_type) and reason_against_lengths(config, model_config, dtype) is None


def head_size(model_config: Any) -> int:
    """Return the channels of a head of queries."""
    text = model_config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def choose_layout(config: Config, model_config: Any, attention: str, *, by_lengths: bool = False) -> Layout:
    """Return the layout of micro-batches: for `auto` `grouped` or `packed` if the model supports them, else `padded`.

    Which of the two: see `cheaper_layout`. Without kernels that read lengths it is `grouped`: `packed` needs a mask.

    Sequence and tensor parallelism serve long sequences: then `padded`, which needs no mask, is best. Branched
    attention is built on `sdpa`; with any other attention, grouped means `grouped_masked`.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: transformers' name of the attention that the model is loaded with; a device's fused attention, which
            accepts the same arguments as sdpa, is inserted later.
        by_lengths: `may_use_lengths`.

    Raises:
        ConfigError: the configured layout has several sequences per row, and the model's layers see beyond its mask: a
            window shorter than the longest sequence, a recurrent state that leaks into the next sequence, or tokens of
            images that attend to later ones.
    """
    text = model_config.get_text_config()
    states = layers_beyond_attention(text)
    window = windows_in_reach(config.data, config.rollout, model_config)
    wanted = config.model.layout
    if wanted == "auto":
        if why_padded(config, model_config, attention) is not None:
            wanted = "padded"
        else:
            wanted = _by_tokens(config, model_config) if by_lengths and attention == "sdpa" else "grouped"
    if wanted == "grouped" and attention != "sdpa":
        wanted = "grouped_masked"
    one_mask = wanted == "grouped_masked" or (wanted == "packed" and attention != "sdpa")
    if attends_both_ways(model_config) and wanted != "padded":
        raise ConfigError(
            f"model.layout={config.model.layout!r} with a {model_config.model_type} model: {BOTH_WAYS}; use "
            "model.layout=padded"
        )
    conflicts = (
        (", ".join(states), wanted != "padded"),
        (_shorter(window), bool(window) and one_mask),
    )
    for reason, applies in conflicts:
        if reason and applies:
            raise ConfigError(
                f"model.layout={config.model.layout!r} with a {text.model_type} model ({reason}): sequences in one row "
                "would see each other; use model.layout=padded"
            )
    if window and wanted in ("grouped", "packed"):
        return BRANCHED if wanted == "grouped" else PACKED_BRANCHED
    return LAYOUTS.load(wanted)


def _by_tokens(config: Config, model_config: Any) -> str:
    hidden_size = model_config.get_text_config().hidden_size
    return cheaper_layout(
        config.data.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.n, hidden_size
    )


def layout_of(config: Config, device: Device) -> Layout:
    """Return the layout of micro-batches for the run's model and compute dtype on this device."""
    settings, dtype = load_model_config(config.model), choose_dtype(config.model.dtype, device)
    by_lengths = may_use_lengths(config, settings, dtype, device.backend.device_type)
    return choose_layout(config, settings, attention_of(config, device).loaded_as, by_lengths=by_lengths)


def why_padded(config: Config, model_config: Any, attention: str) -> str | None:
    """Return why `model.layout=auto` is padded, as far as the model's configuration shows; None if it is not.

    Args:
        config: the run's settings.
        model_config: the transformers configuration of the model.
        attention: transformers' name of the attention that the model is loaded with.
    """
    if config.model.layout != "auto":
        return None
    text = model_config.get_text_config()
    states = layers_beyond_attention(text)
    window = windows_in_reach(config.data, config.rollout, model_config)
    if states:
        return f"a {text.model_type} model has layers in which no mask separates sequences ({', '.join(states)})"
    if attends_both_ways(model_config):
        return f"in a {model_config.model_type} model {BOTH_WAYS}"
    if ranks_per_sequence(config) > 1:
        return "a mask over full rows would be as large on each of the ranks that share them"
    if attention not in ACCEPT_MASKS:
        return f"attention {attention} accepts no mask"
    if window and attention != "sdpa":
        return f"{_shorter(window)}, and attention {attention} cannot be given windows without a mask over the row"
    return None


def layout_note(config: Config, model_config: Any, attention: str, *, by_lengths: bool = False) -> str | None:
    """Return a log line with the reason where `auto` is not grouped rows; None elsewhere."""
    reason = why_padded(config, model_config, attention)
    if reason is not None:
        return f"layout padded (one sequence per row): {reason}"
    layout = choose_layout(config, model_config, attention, by_lengths=by_lengths)
    if config.model.layout != "auto" or layout.name != "packed":
        return None
    saved = saved_share(config.data.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.n)
    return f"layout packed (rows without padding): one prompt per group would save {saved:.0%} of the tokens"


def micro_batch_tokens(config: Config, device: torch.device) -> int:
    """Return the token budget of a micro-batch: the configured one, else the device's default."""
    if config.trainer.tokens_per_micro_batch is not None:
        return config.trainer.tokens_per_micro_batch
    if device.type != "cpu":
        return max(longest_share(config), ACCELERATOR_MICRO_BATCH)
    group = config.data.max_prompt_tokens + config.rollout.n * config.rollout.max_response_tokens
    return max(longest_share(config), CPU_MICRO_BATCH, min(group, CPU_LONGEST_ROW))


def windows_in_reach(data: DataConfig, rollout: RolloutConfig, model_config: Any) -> dict[str, int]:
    """Return setting -> tokens for the model's attention windows that are shorter than the longest sequence."""
    return windows_below(model_config, data.max_prompt_tokens + rollout.max_response_tokens)


def _shorter(windows: Mapping[str, int]) -> str:
    return f"{describe_windows(windows)} is shorter than a sequence can be"


def layers_beyond_attention(text: Any) -> list[str]:
    """Return the kinds of layers in which earlier tokens affect a token by more than masked attention."""
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    return sorted(kinds) or (["no attention"] if getattr(text, "is_attention_free", False) else [])
