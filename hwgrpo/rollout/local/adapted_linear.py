"""Linear layers of the lean step, with peft's LoRA adapters.

Layers of the same input are one product where their weights stand side by side in memory (`read_joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hwgrpo.models.quantization import QuantizedLinear
from hwgrpo.rollout.local.joined_weights import join
from hwgrpo.rollout.local.packed_weights import PackedWeights, Product

LORA_MODEL = "peft.tuners.lora.model.LoraModel"
LORA_LINEAR = "peft.tuners.lora.layer.Linear"
LINEAR = (nn.Linear, QuantizedLinear)
"""Linear layers that `read_projection` supports; not subclasses of them."""

_ALL = slice(None)


@dataclass(frozen=True)
class Addition:
    """What an adapter adds to some outputs of a layer: scaling * up @ low."""

    up: torch.Tensor
    """[outputs, rank]."""
    scaling: float
    outputs: slice
    """Of the layer."""
    ranks: slice
    """Of the adapters' inner values."""


@dataclass(frozen=True)
class Adapters:
    """Low-rank additions to a weight, or to weights of the same input (Hu et al. 2021)."""

    down: torch.Tensor
    """[ranks, inputs]."""
    additions: tuple[Addition, ...]

    def add_to(self, total: torch.Tensor, hidden: torch.Tensor, factor: float = 1.0) -> None:
        low = F.linear(hidden, self.down)
        for each in self.additions:
            outputs = total[:, each.outputs]
            outputs.addmm_(low[:, each.ranks], each.up.t(), alpha=factor * each.scaling)


@dataclass(frozen=True)
class Projection:
    """A linear layer with the model's own tensors."""

    weight: torch.Tensor
    """[outputs, inputs]; the codes of a quantized layer."""
    bias: torch.Tensor | None
    """[outputs]."""
    adapters: tuple[Adapters, ...] = ()
    dequantized: Callable[[torch.dtype], torch.Tensor] | None = None
    """Returns a quantized layer's weight in a dtype."""
    parts: tuple[torch.Tensor, ...] = ()
    """The layers' weights; side by side, where there are several."""
    product: Product | None = None
    """With weight and bias; None: torch's."""

    def by_packed(self, packed: PackedWeights) -> Projection:
        """Return the projection with products by packed weights, where these are faster."""
        return self if self.dequantized else replace(self, product=packed.product(self.parts, self.weight))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, outputs] of hidden states [B, inputs]."""
        if self.product is not None:
            result = self.product(hidden, self.bias)
        else:
            result = F.linear(hidden, self._operand(hidden.dtype), self.bias)
        for each in self.adapters:
            each.add_to(result, hidden)
        return result

    def add_to(self, total: torch.Tensor, hidden: torch.Tensor, factor: float) -> None:
        """Add factor * layer(hidden) to `total` [B, outputs] in place."""
        if self.product is not None:
            total.add_(self.product(hidden, self.bias), alpha=factor)
        else:
            total.addmm_(hidden, self._operand(hidden.dtype).t(), alpha=factor)
            if self.bias is not None:
                total.add_(self.bias, alpha=factor)
        for each in self.adapters:
            each.add_to(total, hidden, factor)

    def _operand(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight if self.dequantized is None else self.dequantized(dtype)


@dataclass(frozen=True)
class Concatenated:
    """Linear layers of the same input, one product each."""

    parts: tuple[Projection, ...]

    def by_packed(self, packed: PackedWeights) -> Concatenated:
        """See `Projection.by_packed`."""
        return Concatenated(tuple(part.by_packed(packed) for part in self.parts))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, outputs of all] of hidden states [B, inputs]."""
        return torch.cat([part(hidden) for part in self.parts], dim=1)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is peft's linear layer with LoRA adapters."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == LORA_LINEAR


def unsupported_reason(module: Any) -> str | None:
    """Return why `read_projection` does not support an adapted layer, or None."""
    if type(module.base_layer) not in LINEAR:
        return f"adapts a {type(module.base_layer).__name__}"
    for name in active_adapters(module):
        if name in module.lora_variant:
            return f"has an adapter of another kind ({type(module.lora_variant[name]).__name__})"
        for part in (module.lora_A[name], module.lora_B[name]):
            if type(part) is not nn.Linear or part.bias is not None:
                return "has an adapter with a bias or of other layers"
    return None


def read_projection(module: Any) -> Projection:
    """Return the projection of a supported linear layer, without dropout."""
    adapted = is_adapted(module)
    base = module.base_layer if adapted else module
    adapters = [
        Adapters(module.lora_A[n].weight, (Addition(module.lora_B[n].weight, module.scaling[n], _ALL, _ALL),))
        for n in (active_adapters(module) if adapted else ())
    ]
    dequantized = base.dequantized if isinstance(base, QuantizedLinear) else None
    return Projection(base.weight, base.bias, tuple(adapters), dequantized, (base.weight,))


def read_joined(*modules: Any) -> Projection | Concatenated:
    """Return the projection to the outputs of several supported linear layers of the same input, one after another.

    The layers' weights are moved side by side, where that is possible.
    """
    parts = tuple(read_projection(module) for module in modules)
    biases = [part.bias for part in parts]
    if len({bias is None for bias in biases}) > 1 or any(part.dequantized for part in parts):
        return Concatenated(parts)
    weight, bias = join([part.weight for part in parts]), join([bias for bias in biases if bias is not None])
    if weight is None or (bias is None and biases[0] is not None):
        return Concatenated(parts)
    ends = list(accumulate(len(part.weight) for part in parts))
    outputs = [slice(end - len(part.weight), end) for part, end in zip(parts, ends, strict=True)]
    alone = [
        (each.down, replace(each.additions[0], outputs=columns))
        for part, columns in zip(parts, outputs, strict=True)
        for each in part.adapters
    ]
    return Projection(weight, bias, _join_adapters(alone), parts=tuple(part.weight for part in parts))


def _join_adapters(alone: Sequence[tuple[torch.Tensor, Addition]]) -> tuple[Adapters, ...]:
    downs = [down for down, _ in alone]
    joined = join(downs)
    if joined is None:
        return tuple(Adapters(down, (addition,)) for down, addition in alone)
    ends = accumulate(len(down) for down in downs)
    return (
        Adapters(
            joined,
            tuple(
                replace(addition, ranks=slice(end - len(down), end))
                for (down, addition), end in zip(alone, ends, strict=True)
            ),
        ),
    )


def active_adapters(module: Any) -> list[str]:
    """Return the adapters that a forward pass adds; merged ones are already in the weight."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]
