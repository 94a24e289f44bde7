"""The gate of an MLP, silu(gate) * up in one read and one write: `npu_swiglu(cat([gate, up]), dim=-1)`, or in Triton.

Replaces MLPs whose forward is down(silu(gate(x)) * up(x)), with two projections or one that makes both halves, the gate
first. Anything else in a forward would be lost, so its byte code may name nothing beyond these parts.

Source: torch-npu's document of torch_npu.npu_swiglu, CANN's aclnnSwiGlu. That op has never run on hardware.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .fused_forwards import in_triton, mark

NAME, OP = "swiglu", "npu_swiglu"

TWO = {"gate_proj", "up_proj", "act_fn", "down_proj"}
ONE = {"gate_up_proj", "chunk", "activation_fn", "down_proj"}
"""Names in the byte code of the two kinds of forward."""


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sub-modules of a model that have a gate and a projection down, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "down_proj") and (hasattr(module, "gate_proj") or hasattr(module, "gate_up_proj")):
            yield name, module


def reason_against(module: Any) -> str | None:
    """Return why this op cannot replace an MLP, or None."""
    parts = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    if not all(isinstance(getattr(module, part), nn.Module) for part in parts if hasattr(module, part)):
        return "its projections are bare parameters"
    gate = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if not isinstance(gate, nn.SiLU) and type(gate).__name__ != "SiLUActivation":
        return f"its gate is {type(gate).__name__}, not SiLU"
    code = type(module).forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or set(code.co_names) not in (TWO, ONE):
        return "its forward does more than gate, up and down"
    return None


def forward_two(self: Any, x: Tensor) -> Tensor:
    """Return [..., H] of [..., H] through `gate_proj`, `up_proj` and `down_proj`."""
    if in_triton(x.device.type):
        return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x)))
    return self.down_proj(torch.ops.npu.npu_swiglu(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1), dim=-1))


def forward_one(self: Any, hidden_states: Tensor) -> Tensor:
    """Return [..., H] of [..., H] through `gate_up_proj`, whose first half is the gate, and `down_proj`."""
    if in_triton(hidden_states.device.type):
        return self.down_proj(_gated(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))
    return self.down_proj(torch.ops.npu.npu_swiglu(self.gate_up_proj(hidden_states), dim=-1))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    from hwgrpo_kernels import module_triton  # imports triton

    return module_triton.swiglu(gate, up)


def forward_of(module: nn.Module) -> Any:
    """Return the fused forward for an MLP's projections."""
    return forward_one if hasattr(module, "gate_up_proj") else forward_two


mark(forward_two, NAME)  # type: ignore[arg-type]
mark(forward_one, NAME)  # type: ignore[arg-type]
