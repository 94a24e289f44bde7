"""Frozen weights in 4 or 8 bits (QLoRA, Dettmers et al. 2023): dequantized for each product, on any device.

nf4 is bitsandbytes' format without double quantization: 4.5 bits per weight. int8 scales each row, the weights of an
output, by its largest weight: 8 bits per weight; unlike LLM.int8() inputs are not quantized. Gradients are those of the
dequantized weight. Linear layers are replaced; experts that are stacked in one tensor stay in their module, and
`experts.experts_forward` dequantizes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hwgrpo_kernels
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hwgrpo.errors import ConfigError

SCALE_BYTES = torch.float32.itemsize
CHUNK = 2**22
"""Values of int8 codes that are converted at a time, since the products with their scales are fp32."""


@dataclass(frozen=True)
class Codes:
    """The format of a quantized weight: bytes of its codes, then of its fp32 scales.

    As one uint8 parameter both are moved, broadcast and shared together, and no cast touches them.
    """

    method: str
    """nf4 or int8."""
    size: tuple[int, ...]
    """Of the weight: [..., columns]; each row has a scale in int8."""

    def dequantized(self, data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight in a dtype."""
        codes = -(-math.prod(self.size) * CODE_BITS[self.method] // 8)
        scales = data[codes + _padding(codes) :].view(torch.float32)
        if self.method == "nf4":
            return hwgrpo_kernels.dequantize_nf4(data[:codes], scales, self.size, dtype)
        out = scales.new_empty(self.size, dtype=dtype)
        columns = self.size[-1]
        rows = max(1, CHUNK // columns)
        for values, code, scale in zip(
            out.view(-1, columns).split(rows),
            data[:codes].view(torch.int8).view(-1, columns).split(rows),
            scales[:, None].split(rows),
        ):
            values.copy_(code * scale)
        return out


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight [outputs, inputs] is held in 4 or 8 bits.

    Args:
        layer: the layer to quantize; its bias is taken over.
        method: nf4 or int8.
    """

    def __init__(self, layer: nn.Linear, method: str) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.codes = Codes(method, (self.out_features, self.in_features))
        self.bias = layer.bias
        self.weight = nn.Parameter(_quantized(layer.weight, method), requires_grad=False)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [outputs, inputs] in a dtype."""
        return self.codes.dequantized(self.weight, dtype)

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


def quantized_bytes(method: str, *size: int) -> int:
    """Return the bytes of a weight of a size with its scales."""
    codes = -(-math.prod(size) * CODE_BITS[method] // 8)
    scales = math.prod(size[:-1]) if method == "int8" else -(-math.prod(size) // hwgrpo_kernels.NF4_BLOCK)
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
        # the matrix of an expert at a time, since values in fp32 take more memory
        codes, scales = (torch.cat(parts) for parts in zip(*map(_in_8_bits, weight.view(-1, *weight.shape[-2:]))))
    return torch.cat((codes, codes.new_zeros(_padding(len(codes))), scales.view(torch.uint8)))


def _in_8_bits(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, as bytes, and the scales of a matrix's rows."""
    wide = matrix.detach().float()
    scales = wide.abs().amax(1) / 127
    codes = (wide / scales.where(scales > 0, 1.0)[:, None]).round_().to(torch.int8)
    return codes.flatten().view(torch.uint8), scales


def quantizable_weights(model: Any) -> dict[tuple[str, str], nn.Parameter]:
    """Return the weights that are quantized: of linear layers but the LM head, and stacked experts.

    Args:
        model: a transformers causal LM without adapters.

    Returns:
        The weights by the name of their module and its attribute.

    Raises:
        ConfigError: it has none, or experts that run by a forward of their own.
    """
    head = model.get_output_embeddings()
    found, unsupported = dict[tuple[str, str], nn.Parameter](), list[str]()
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            found[name, "weight"] = module.get_parameter("weight")
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and hasattr(module, "is_transposed"):
                found[name, own] = parameter
            elif _is_stacked(name, module, parameter):
                unsupported.append(f"its experts ({name}.{own}) run by a forward of their own")
    if unsupported or not found:
        reason = unsupported[0] if unsupported else "it has no linear layers"
        raise ConfigError(
            f"model.quantize: {type(model).__name__} is not supported: {reason}; leave model.quantize out"
        )
    return found


def _is_stacked(name: str, module: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds several experts' weights that `experts_forward` does not multiply."""
    if isinstance(module, nn.Linear) or hasattr(module, "is_transposed"):
        return False
    in_experts = parameter.dim() >= 2 and ".experts." in f"{name}."
    return in_experts or (parameter.dim() == 3 and hasattr(module, "num_experts"))


@torch.no_grad()
def quantize(model: Any, method: str) -> None:
    """Replace linear layers by quantized ones, and stacked experts by their codes, one after another.

    Args:
        model: as for `quantizable_weights`; of `load_model`, by which experts run by `experts_forward`.
        method: nf4, int8, or none to leave it as it is.
    """
    if method == "none":
        return
    for name, own in list(quantizable_weights(model)):  # without the weights, so that each is freed
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, QuantizedLinear(module, method))
        else:
            weight = module.get_parameter(own)
            codes = Codes(method, tuple(weight.shape))
            module.stacked_codes = getattr(module, "stacked_codes", {}) | {own: codes}  # see `experts_forward`
            setattr(module, own, nn.Parameter(_quantized(weight, method), requires_grad=False))


def quantized_weights(model: nn.Module) -> dict[nn.Parameter, Codes]:
    """Return the quantized weights of a model, with their formats."""
    found = dict[nn.Parameter, Codes]()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            found[module.get_parameter("weight")] = module.codes
        else:
            stacked = vars(module).get("stacked_codes", {})
            found |= {module.get_parameter(name): codes for name, codes in stacked.items()}
    return found


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace quantized layers by ordinary ones in fp32, and codes of experts by their values."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                setattr(module, name, child.as_linear())
        for name, codes in vars(module).pop("stacked_codes", {}).items():
            setattr(module, name, nn.Parameter(codes.dequantized(getattr(module, name)), requires_grad=False))
