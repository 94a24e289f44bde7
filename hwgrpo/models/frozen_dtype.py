"""The dtype of frozen parameters: those that only matrix products read are held in the compute dtype.

Autocast casts these operands for every product anyway. If a parameter's values are exact in the compute dtype, as those
of a published bf16 model are, results do not change, and the cast copies are saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hwgrpo.models.meta_device import parameter_slots


def product_operands(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that only matrix products read: those of linear layers, and stacked experts.

    Embeddings (with a tied LM head) and norms stay out, since their dtype is that of the residual stream, and quantized
    weights, which no cast may touch.

    Args:
        model: without adapters, whose own parameters are masters.
    """
    return [
        parameter
        for parameter, owners in parameter_slots(model).items()
        if parameter.is_floating_point() and all(_only_multiplies(owner, parameter) for owner, _ in owners)
    ]


def _only_multiplies(owner: Any, parameter: nn.Parameter) -> bool:
    if isinstance(owner, nn.Linear | Conv1D):
        return True
    return parameter.dim() == 3 and hasattr(owner, "num_experts")


def split_operands(model: nn.Module) -> list[nn.Parameter]:
    """Return `product_operands`, and cast all other parameters to fp32, but for quantized ones."""
    operands = product_operands(model)
    for parameter in set(model.parameters()) - set(operands):
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return operands


def hold_base_in(base_dtype: str, operands: Sequence[nn.Parameter], compute_dtype: torch.dtype) -> None:
    """Cast the matrices of a frozen base model as `model.lora.base_dtype` says, to fp32 or the compute dtype.

    Args:
        base_dtype: auto, float32 or bfloat16.
        operands: the base model's; `product_operands` before it got adapters.
        compute_dtype: dtype of the products; if it is fp32, values rounded to bf16 are held in fp32.
    """
    if base_dtype == "bfloat16":
        cast_frozen(operands, torch.bfloat16, round_values=True)
        cast_frozen(operands, compute_dtype, round_values=False)
    elif base_dtype == "auto":
        cast_frozen(operands, compute_dtype, round_values=False)


def release_files(model: nn.Module) -> None:
    """Copy frozen fp32 parameters if others were cast: one still mapped from a file keeps all of it in memory."""
    frozen = [parameter for parameter in model.parameters() if not (parameter.requires_grad or parameter.is_meta)]
    if any(parameter.dtype != torch.float32 for parameter in frozen):
        for parameter in frozen:
            parameter.data = parameter.data.clone() if parameter.dtype == torch.float32 else parameter.data


@contextmanager
def as_fp32(operands: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters look like fp32 ones within the block, without memory: peft makes adapters in their dtype."""
    held = [(parameter, parameter.data) for parameter in operands]
    for parameter, data in held:
        parameter.data = torch.zeros((), dtype=torch.float32, device=data.device).expand(data.shape)
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


@torch.no_grad()
def cast_frozen(parameters: Sequence[nn.Parameter], dtype: torch.dtype, *, round_values: bool) -> bool:
    """Cast frozen parameters in place; return whether they are in `dtype` now.

    Args:
        parameters: trainable ones are skipped.
        dtype: the compute dtype.
        round_values: cast values that are not exact in `dtype`, too. Otherwise one of them leaves all as they are.
    """
    frozen = [p for p in parameters if not p.requires_grad and p.dtype != dtype]
    if not round_values and not all(p.is_meta or torch.equal(p.to(dtype).to(p.dtype), p) for p in frozen):
        return False
    for parameter in frozen:
        parameter.data = parameter.data.to(dtype)
    return True
