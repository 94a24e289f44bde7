"""What a run will hold in a device's memory, worked out from its settings and the model's sizes.

An estimate: responses are taken to be as long as they may be; what allocators round up, kernels take as workspace and
libraries load is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hwgrpo_kernels.chunks import chunk_rows_for
from hwgrpo_kernels.head import logits_buffers

from hwgrpo.config import Config
from hwgrpo.models.lora import uses_lora
from hwgrpo.training.shapes import ModelShape


@dataclass(frozen=True)
class Work:
    """What runs on one device."""

    dtype: torch.dtype
    """Compute dtype."""
    device_type: str
    """torch's word for the device."""
    prompts: int
    """Prompts of a step on this device."""
    prompt_tokens: int
    """Longest prompt."""
    micro_batch_tokens: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by component. Rollout and update take turns."""

    always: dict[str, int]
    rollout: dict[str, int]
    update: dict[str, int]

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return sum(self.always.values()) + max(sum(self.rollout.values()), sum(self.update.values()))


def estimate(config: Config, shape: ModelShape, work: Work) -> Memory:
    """Estimate what one device holds; every device holds a whole model.

    Args:
        config: the run's settings.
        shape: the model's sizes.
        work: what runs on the device.
    """
    rollout_dtype = work.dtype if config.rollout.dtype == "auto" else getattr(torch, config.rollout.dtype)
    adapters = shape.trainable if uses_lora(config.model.lora) else 0
    always = {
        "parameters (fp32)": 4 * (shape.parameters + adapters),
        "gradients (fp32)": 4 * shape.trainable,
        "AdamW moments": 8 * shape.trainable,
    }
    if config.algorithm.kl.coef and not adapters:
        always["reference model"] = 4 * shape.parameters
    if rollout_dtype != torch.float32:
        always["copy that samples"] = rollout_dtype.itemsize * shape.parameters
    update = {
        f"activations of {work.micro_batch_tokens:,} tokens, about": activation_bytes(
            shape, work.micro_batch_tokens, work.dtype, config.model.gradient_checkpointing
        ),
        "a chunk of logits": _logits_bytes(config, shape, work),
    }
    if not adapters:
        update["gradient of the LM head (fp32)"] = 4 * shape.vocab * shape.hidden
    if work.dtype != torch.float32:
        # autocast keeps trainable weights that it has cast until the pass is over, frozen ones until their layer is
        recast = adapters and config.model.gradient_checkpointing
        update["weights as cast"] = work.dtype.itemsize * shape.parameters // (shape.layers if recast else 1)
    sequences = work.prompts * config.rollout.n
    together = min(sequences, config.rollout.max_sequences)
    rollout = {
        f"key-value cache of {together:,} sequences": cache_bytes(
            shape,
            prompts=-(-together // config.rollout.n),
            sequences=together,
            prompt_tokens=work.prompt_tokens,
            response_tokens=config.rollout.max_response_tokens,
            itemsize=rollout_dtype.itemsize,
        )
    }
    return Memory(always, rollout, update)


def cache_bytes(
    shape: ModelShape, *, prompts: int, sequences: int, prompt_tokens: int, response_tokens: int, itemsize: int
) -> int:
    """Return the bytes of keys and values when every response is as long as it may be; a prompt's are stored once."""
    tokens = prompts * prompt_tokens + sequences * response_tokens
    return 2 * itemsize * shape.layers * shape.kv_heads * shape.head_dim * tokens


def activation_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype, recomputed: bool) -> int:
    """Estimate what the layers keep for the backward pass.

    Counted on Llama's layer with fused attention: per token two norms keep input and normed input in fp32, the linear
    layers their inputs (cast once for each under autocast), attention its operands and output, and the gated
    feed-forward part four vectors of its width. Norms on queries and keys, or behind a block, add up to a third.

    Args:
        shape: the model's sizes.
        tokens: of a micro-batch.
        dtype: compute dtype.
        recomputed: gradient checkpointing keeps each layer's input, and one layer whole at a time.
    """
    h, size = shape.hidden, dtype.itemsize
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    inputs = 2 * h if dtype == torch.float32 else 5 * h
    layer = 4 * 4 * h + size * (inputs + attention + 4 * shape.intermediate)
    kept = 4 * h * shape.layers + layer if recomputed else layer * shape.layers
    return kept * tokens


def _logits_bytes(config: Config, shape: ModelShape, work: Work) -> int:
    wanted = config.kernels.logits_dtype
    dtype = work.dtype if wanted == "auto" else getattr(torch, wanted)
    if work.device_type == "cpu":
        dtype = torch.float32  # the work is done in fp32 whatever the buffer holds
    buffers = logits_buffers(work.dtype, dtype, work.device_type)
    rows = config.kernels.chunk_rows or chunk_rows_for(shape.vocab, dtype, work.device_type, buffers)
    return min(rows, work.micro_batch_tokens) * buffers * shape.vocab * dtype.itemsize


def in_words(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
