"""Stacked experts of a mixture: products in the compute dtype, of weights that may be quantized, with adapters.

Autocast does not reach torch's grouped product, so that transformers multiplies in the dtype of the weights: in fp32
for masters, in bf16 for a base model held in it. Here experts are multiplied as linear layers are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_mm

from hwgrpo.models.quantization import Codes

IMPLEMENTATION = "hwgrpo"
"""Name of `experts_forward` among transformers' experts implementations."""


class LowRank(NamedTuple):
    """An adapter of stacked experts: scaling * up @ down is added to each expert's weight."""

    down: Tensor
    """[experts, inputs, rank]."""
    up: Tensor
    """[experts, rank, outputs]."""
    scaling: float


def set_experts_forward(model: PreTrainedModel) -> None:
    """Let a model's stacked experts run by `experts_forward`, where its class lets them."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(IMPLEMENTATION)


def runs_here(module: Any) -> bool:
    """Return whether a module holds stacked experts that run by `experts_forward`."""
    config = getattr(module, "config", None)
    return hasattr(module, "is_transposed") and getattr(config, "_experts_implementation", None) == IMPLEMENTATION


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum [tokens, hidden] of each token's experts.

    Args:
        self: a module that transformers decorates with `use_experts_implementation`.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k] experts of each token.
        top_k_weights: [tokens, k] their weights.
    """
    tokens, k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.flatten())
    # rows up to the end of each expert
    ends = torch.searchsorted(chosen, torch.arange(self.num_experts, device=chosen.device), right=True, out_int32=True)
    rows = _product(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states[order // k], chosen, ends)
    rows = _product(self, "down_proj", self._apply_gate(rows) if self.has_gate else self.act_fn(rows), chosen, ends)
    rows = rows * top_k_weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def _product(experts: Any, name: str, rows: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
    """Return each row's product with its expert's weight, in autocast's dtype or the weight's."""
    weight: Tensor = getattr(experts, name)
    codes: Codes | None = getattr(experts, "stacked_codes", {}).get(name)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = rows.dtype if codes else weight.dtype
    rows = rows.to(dtype)
    if codes:
        out = _DequantizedProduct.apply(rows, weight, ends, codes, experts.is_transposed)
    else:
        out = _grouped_mm(rows, _from_inputs(weight.to(dtype), experts.is_transposed), ends)
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[chosen].to(dtype)
    for adapter in getattr(experts, "adapters", {}).get(name, ()):
        inner = _grouped_mm(rows, adapter.down.to(dtype), ends)
        out = out + adapter.scaling * _grouped_mm(inner, adapter.up.to(dtype), ends)
    return out


def _from_inputs(weight: Tensor, transposed: bool) -> Tensor:
    """Return a stacked weight as [experts, inputs, outputs]; transposed: it is stored so."""
    return weight if transposed else weight.transpose(1, 2)


class _DequantizedProduct(torch.autograd.Function):
    """Products with a frozen stacked weight that is dequantized again for the backward pass, so that none is stored."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, codes: Codes, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight, ends)  # fails if something overwrites them before the backward pass
        ctx.codes, ctx.transposed = codes, transposed
        return _grouped_mm(rows, _from_inputs(codes.dequantized(weight, rows.dtype), transposed), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        weight, ends = ctx.saved_tensors
        matrix = _from_inputs(ctx.codes.dequantized(weight, gradient.dtype), ctx.transposed)
        return _grouped_mm(gradient, matrix.transpose(1, 2), ends), None, None, None, None


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
