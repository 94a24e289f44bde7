"""RMSNorm by `npu_rms_norm(x, gamma, epsilon)` or in Triton: square, mean, root and both products in one read of x.

Replaces layers that compute weight * x / sqrt(mean(x^2) + epsilon) and nothing else. Gemma's multiply by 1 + weight,
which would need a new gamma at every call, so those are skipped. Both accumulate in fp32 for any input dtype and round
once; the plain layer also rounds before the weight.

Where the residual stream is fp32 and linear layers alone read a norm's output, autocast would cast it for each of them.
In Triton such a norm (`compute_dtype.py` finds them) writes the compute dtype itself, as one copy for each reader.

Source: torch-npu's document of torch_npu.npu_rms_norm, CANN's aclnnRmsNorm. That op has never run on hardware.
"""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .compute_dtype import autocast_dtype, hand_out
from .fused_forwards import in_triton, mark
from .self_test import relative_difference, tolerance

NAME, OP = "rms_norm", "npu_rms_norm"


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the RMSNorm layers of a model with their names."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield name, module


def reason_against(module: Any) -> str | None:
    """Return why this op cannot replace a layer, judged by its attributes, or None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return "it has no one-dimensional weight"
    if getattr(module, "bias", None) is not None:
        return "it has a bias"
    if not isinstance(epsilon(module), float):
        return "it has no attribute for epsilon"
    code = type(module).forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount:
        return "its forward takes more than the hidden states"
    return None


def epsilon(module: Any) -> Any:
    """Return the epsilon that a layer adds to the mean of squares; None if it has no such attribute."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def reason_from_values(module: Any, plain: Tensor, hidden: Tensor) -> str | None:
    """Return why a layer computes another function than the op, judged by its output, or None."""
    x = hidden.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon(module))
    allowed = tolerance(plain, hidden)
    if relative_difference(plain, normed * module.weight.float()) <= allowed:
        return None
    if relative_difference(plain, normed * (1 + module.weight.float())) <= allowed:
        return "it multiplies by 1 + weight"
    return "it is not a plain RMSNorm"


def forward(self: Any, hidden_states: Tensor, update: Tensor | None = None) -> Any:
    """Return weight * x / sqrt(mean(x^2) + epsilon) in the dtype that torch promotes weight and x to.

    Args:
        self: the layer; its weight is [H].
        hidden_states: [..., H].
        update: what a decoder layer adds first (`add_norm.py`); the result is then the sum, and the norm of it.
    """
    if in_triton(hidden_states.device.type):
        return _in_triton(self, hidden_states, update, None, 1)
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return torch.ops.npu.npu_rms_norm(hidden_states.to(dtype), self.weight.to(dtype), epsilon=epsilon(self))[0]


def forward_for(readers: int) -> FunctionType:
    """Return the forward of a norm that so many linear layers read: in the compute dtype, a copy for each."""

    def forward_for_linears(self: Any, hidden_states: Tensor, update: Tensor | None = None) -> Any:
        copies = readers if torch.is_grad_enabled() else 1
        return _in_triton(self, hidden_states, update, autocast_dtype(hidden_states), copies)

    mark(forward_for_linears, NAME)
    return forward_for_linears


def _in_triton(norm: Any, x: Tensor, update: Tensor | None, dtype: torch.dtype | None, copies: int) -> Any:
    from hwgrpo_kernels import module_triton  # imports triton

    if update is None:
        first, *more = module_triton.rms_norm_copies(x, norm.weight, epsilon(norm), dtype, copies)
        hand_out(first, more)
        return first
    total, first, *more = module_triton.add_rms_norm(x, update, norm.weight, epsilon(norm), dtype, copies)
    hand_out(first, more)
    return total, first


mark(forward, NAME)  # type: ignore[arg-type]
