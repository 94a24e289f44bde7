"""Linear layers of the lean step, with peft's LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hwgrpo.models.quantization import QuantizedLinear

LORA_MODEL = "peft.tuners.lora.model.LoraModel"
LORA_LINEAR = "peft.tuners.lora.layer.Linear"
LINEAR = (nn.Linear, QuantizedLinear)
"""Linear layers that `read_projection` supports; not subclasses of them."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank addition to a weight (Hu et al. 2021): scaling * up @ down."""

    down: torch.Tensor
    """[rank, inputs]."""
    up: torch.Tensor
    """[outputs, rank]."""
    scaling: float


@dataclass(frozen=True)
class Projection:
    """A linear layer with the model's own tensors."""

    weight: torch.Tensor
    """[outputs, inputs]; the codes of a quantized layer."""
    bias: torch.Tensor | None
    """[outputs]."""
    adapters: tuple[Adapter, ...] = ()
    dequantized: Callable[[torch.dtype], torch.Tensor] | None = None
    """Returns a quantized layer's weight in a dtype."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, outputs] of hidden states [B, inputs]."""
        result = F.linear(hidden, self._operand(hidden.dtype), self.bias)
        for adapter in self.adapters:
            result.addmm_(F.linear(hidden, adapter.down), adapter.up.t(), alpha=adapter.scaling)
        return result

    def add_to(self, total: torch.Tensor, hidden: torch.Tensor, factor: float) -> None:
        """Add factor * layer(hidden) to `total` [B, outputs] in place."""
        total.addmm_(hidden, self._operand(hidden.dtype).t(), alpha=factor)
        if self.bias is not None:
            total.add_(self.bias, alpha=factor)
        for adapter in self.adapters:
            total.addmm_(F.linear(hidden, adapter.down), adapter.up.t(), alpha=factor * adapter.scaling)

    def _operand(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight if self.dequantized is None else self.dequantized(dtype)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is peft's linear layer with LoRA adapters."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == LORA_LINEAR


def unsupported_reason(module: Any) -> str | None:
    """Return why `read_projection` does not support an adapted layer, or None."""
    if type(module.base_layer) not in LINEAR:
        return f"adapts a {type(module.base_layer).__name__}"
    for name in _active(module):
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
        Adapter(module.lora_A[n].weight, module.lora_B[n].weight, module.scaling[n])
        for n in (_active(module) if adapted else ())
    ]
    dequantized = base.dequantized if isinstance(base, QuantizedLinear) else None
    return Projection(base.weight, base.bias, tuple(adapters), dequantized)


def _active(module: Any) -> list[str]:
    """Return the adapters that a forward pass adds; merged ones are already in the weight."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]
