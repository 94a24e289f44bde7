"""peft's adapters of stacked experts, multiplied as those of linear layers are.

peft adds scaling * B @ A to the weight, in the weight's dtype: in bf16 that rounds the sum, and each forward pass makes
a second weight, of which the backward pass makes a full gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from hwgrpo.models.experts import LowRank, runs_here


class AdaptedExperts(ParamWrapper):
    """Stacked experts with adapters on one of their weights, of which `experts_forward` adds low-rank products."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        base: Any = self.get_base_layer()
        if not runs_here(base):
            with super()._activate_lora(active_adapters):
                yield
            return
        adapters = [self._low_rank(name) for name in active_adapters if name in self.lora_A]
        base.adapters = {**getattr(base, "adapters", {}), self.parameter_name: adapters}
        try:
            yield
        finally:
            base.adapters = {name: held for name, held in base.adapters.items() if name != self.parameter_name}

    def _low_rank(self, name: str) -> LowRank:
        layer: Any = self
        down, up, experts = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.num_experts
        return LowRank(
            down.view(experts, -1, down.shape[1]).transpose(1, 2),
            up.view(up.shape[0], -1, experts).permute(2, 1, 0).contiguous(),
            self.scaling[name],
        )


def multiply_adapters(model: nn.Module) -> None:
    """Let peft's adapters of stacked experts be low-rank products where `experts_forward` runs."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedExperts
