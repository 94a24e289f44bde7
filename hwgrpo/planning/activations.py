"""Bytes of activations that a model's layers keep for the backward pass."""

from __future__ import annotations

import torch

from hwgrpo.planning.model_shape import ModelShape


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    dtype: torch.dtype,
    recomputed: bool,
    copied_keys: float | None = None,
    gathered_by: int = 1,
) -> int:
    """Estimate what the layers keep for the backward pass.

    Counted on layers of Llama's kind with fused attention: per token norms keep input and normed input in fp32, those
    of queries and keys too, the linear layers their inputs (cast once for each under autocast), attention its operands
    and output, and the gated feed-forward part four vectors of its width.

    Args:
        shape: the model's sizes.
        tokens: of a micro-batch.
        dtype: compute dtype.
        recomputed: gradient checkpointing keeps each layer's input, and one layer whole at a time.
        copied_keys: keys that branched attention copies per token; it keeps its operands before and after it takes them
            apart. None: attention leaves rows as they are.
        gathered_by: devices that layers are cut over: linear layers read the tokens of all of them.
    """
    h, size = shape.hidden, dtype.itemsize
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs, values = shape.heads * shape.value_dim, shape.kv_heads * shape.value_dim
    attention = queries + outputs + keys + values
    if copied_keys is not None:
        attention += queries + outputs + int((keys + values) * copied_keys)
    norms = 2 * 4 * (shape.norms * h + (queries + keys if shape.head_norms else 0))
    inputs = 2 * h * gathered_by if dtype == torch.float32 or gathered_by > 1 else 5 * h
    layer = norms + size * (inputs + attention + 4 * shape.intermediate)
    kept = 4 * h * shape.layers + layer if recomputed else layer * shape.layers
    return kept * tokens
