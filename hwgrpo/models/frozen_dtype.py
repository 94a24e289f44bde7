"""The dtype of frozen parameters: matrices of products and embeddings are held in the compute dtype.

Autocast casts the operands of every product anyway, and rows of embeddings are cast to fp32 when they are looked up. If
a parameter's values are exact in the compute dtype, as those of a published bf16 model are, results do not change, and
the cast copies are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hwgrpo.models.meta_device import parameter_slots


class UpcastEmbedding(nn.Embedding):
    """An embedding whose rows are fp32 under autocast, as residual streams need, whatever dtype it is held in."""

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows.float() if torch.is_autocast_enabled(rows.device.type) else rows


def castable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that may have the compute dtype: of linear layers, stacked experts and plain embeddings.

    Norms stay out, and embeddings of other classes (Gemma's scale their rows in the weight's dtype) with a tied LM
    head, since their dtype is that of the residual stream; and quantized weights, which no cast may touch.

    Args:
        model: without adapters, whose own parameters are masters.
    """
    return [
        parameter
        for parameter, owners in parameter_slots(model).items()
        if parameter.is_floating_point() and all(_is_castable(owner, parameter) for owner, _ in owners)
    ]


def _is_castable(owner: Any, parameter: nn.Parameter) -> bool:
    if isinstance(owner, nn.Linear | Conv1D) or type(owner) is nn.Embedding:
        return True
    return parameter.dim() == 3 and hasattr(owner, "num_experts")


def prepare_base(model: nn.Module) -> list[nn.Parameter]:
    """Return `castable_parameters`, let embeddings upcast, and cast all others to fp32, but for quantized ones."""
    castable = castable_parameters(model)
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = UpcastEmbedding
    for parameter in set(model.parameters()) - set(castable):
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return castable


def hold_base_in(base_dtype: str, parameters: Sequence[nn.Parameter], compute_dtype: torch.dtype) -> None:
    """Cast the matrices of a frozen base model as `model.lora.base_dtype` says, to fp32 or the compute dtype.

    Args:
        base_dtype: auto, float32 or bfloat16.
        parameters: the base model's; of `prepare_base` before it got adapters.
        compute_dtype: dtype of the products; if it is fp32, values rounded to bf16 are held in fp32.
    """
    if base_dtype == "bfloat16":
        cast_frozen(parameters, torch.bfloat16, round_values=True)
        cast_frozen(parameters, compute_dtype, round_values=False)
    elif base_dtype == "auto":
        cast_frozen(parameters, compute_dtype, round_values=False)


def release_files(model: nn.Module) -> None:
    """Copy frozen parameters if others are not those of the file: one mapped from a file keeps all of it in memory."""
    frozen = [parameter for parameter in model.parameters() if not (parameter.requires_grad or parameter.is_meta)]
    dtypes = {parameter.dtype for parameter in frozen}
    if dtypes == {torch.float32}:
        return
    # quantized, or stacked from the matrices of the experts
    replaced = torch.uint8 in dtypes or any(parameter.dim() == 3 for parameter in frozen)
    for parameter in frozen:
        # otherwise those that are not fp32 were cast, or all that the file has
        if parameter.dtype == torch.float32 or (replaced and parameter.is_floating_point()):
            parameter.data = parameter.data.clone()


@contextmanager
def as_fp32(shapes: Mapping[nn.Parameter, Sequence[int]]) -> Iterator[None]:
    """Let parameters look like fp32 ones within the block, without memory: peft makes adapters in their dtype.

    Args:
        shapes: the parameters with their shapes, which codes of quantized weights do not have.
    """
    held = [(parameter, parameter.data) for parameter in shapes]
    for parameter, shape in shapes.items():
        parameter.data = torch.zeros((), dtype=torch.float32, device=parameter.device).expand(*shape)
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
