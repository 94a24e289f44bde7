"""Frozen linear layers in 4 or 8 bits (QLoRA, Dettmers et al. 2023): dequantized for each product, on any device.

nf4 is bitsandbytes' format without double quantization: 4.5 bits per weight. int8 scales each output by its largest
weight: 8 bits per weight; unlike LLM.int8() inputs are not quantized. Gradients are those of the dequantized weight.
"""

from __future__ import annotations

import math
from typing import Any

import hwgrpo_kernels
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hwgrpo.errors import ConfigError

SCALE_BYTES = torch.float32.itemsize
CHUNK = 2**22
"""Values of int8 codes that are converted at a time, since the products with their scales are fp32."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight [outputs, inputs] is held in 4 or 8 bits.

    `weight` holds bytes: the codes, then the fp32 scales. As one uint8 parameter both are moved, broadcast and shared
    together, and no cast touches them.

    Args:
        layer: the layer to quantize; its bias is taken over.
        method: nf4 or int8.
    """

    def __init__(self, layer: nn.Linear, method: str) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.method = method
        self.bias = layer.bias
        self.weight = nn.Parameter(_quantized(layer.weight, method), requires_grad=False)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [outputs, inputs] in a dtype."""
        size = (self.out_features, self.in_features)
        codes = -(-math.prod(size) * CODE_BITS[self.method] // 8)
        start = codes + _padding(codes)
        scales = self.weight[start:].view(torch.float32)
        if self.method == "nf4":
            return hwgrpo_kernels.dequantize_nf4(self.weight[:codes], scales, size, dtype)
        out = scales.new_empty(size, dtype=dtype)
        rows = max(1, CHUNK // self.in_features)
        for values, code, scale in zip(
            out.split(rows), self.weight[:codes].view(torch.int8).view(size).split(rows), scales[:, None].split(rows)
        ):
            values.copy_(code * scale)
        return out

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output; under autocast in its dtype, as a linear layer."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        return _Product.apply(input.to(dtype), self.weight, self)

    def as_linear(self) -> nn.Linear:
        """Return an ordinary linear layer with the dequantized weight in fp32."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.dequantized(), requires_grad=False)
        layer.bias = self.bias
        return layer


class _Product(torch.autograd.Function):
    """x @ W^T + b for a frozen W that is dequantized again for the backward pass, so that none is stored."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(weight)  # fails if something overwrites it before the backward pass
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return F.linear(input, layer.dequantized(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        _ = ctx.saved_tensors
        return gradient @ ctx.layer.dequantized(gradient.dtype), None, None


CODE_BITS = {"nf4": 4, "int8": 8}
"""Bits of a weight's code, by `model.quantize`."""


def quantized_bytes(method: str, outputs: int, inputs: int) -> int:
    """Return the bytes of a weight [outputs, inputs] with its scales."""
    codes = -(-outputs * inputs * CODE_BITS[method] // 8)
    scales = outputs if method == "int8" else -(-outputs * inputs // hwgrpo_kernels.NF4_BLOCK)
    return codes + _padding(codes) + SCALE_BYTES * scales


def _padding(codes: int) -> int:
    """Return the bytes after the codes that align the scales."""
    return -codes % SCALE_BYTES


def _quantized(weight: Tensor, method: str) -> Tensor:
    """Return codes, padding and scales of a weight as bytes."""
    if weight.is_meta:
        return weight.new_empty(quantized_bytes(method, *weight.shape), dtype=torch.uint8)
    if method == "nf4":
        codes, scales = hwgrpo_kernels.quantize_nf4(weight)
    else:
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / 127
        codes = (wide / scales.where(scales > 0, 1.0)[:, None]).round_().to(torch.int8).flatten().view(torch.uint8)
    return torch.cat((codes, codes.new_zeros(_padding(len(codes))), scales.view(torch.uint8)))


def quantizable_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers that are quantized, by name: all but the LM head.

    Args:
        model: a transformers causal LM without adapters.

    Raises:
        ConfigError: it has none, or experts that are stacked in one tensor.
    """
    head = model.get_output_embeddings()
    layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name]
    if stacked or not layers:
        reason = f"its experts ({stacked[0]}) are stacked in one tensor" if stacked else "it has no linear layers"
        raise ConfigError(
            f"model.quantize: {type(model).__name__} is not supported: {reason}; leave model.quantize out"
        )
    return layers


@torch.no_grad()
def quantize(model: Any, method: str) -> None:
    """Replace linear layers by quantized ones, one after another.

    Args:
        model: as for `quantizable_layers`.
        method: nf4, int8, or none to leave it as it is.
    """
    if method == "none":
        return
    for name, layer in quantizable_layers(model).items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, QuantizedLinear(layer, method))


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace quantized layers by ordinary ones in fp32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                setattr(parent, name, child.as_linear())
