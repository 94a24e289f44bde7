"""RMSNorm by `npu_rms_norm(x, gamma, epsilon)`: the square, the mean, the root and both products in one read of x.

Taken for layers that compute weight * x / sqrt(mean(x^2) + epsilon) and nothing else. Gemma's multiply by 1 + weight:
another gamma would have to be made at every call, so those are left. The op adds up in fp32 whatever the inputs are,
and rounds once, where the plain layer rounds before the weight too.

Source: torch-npu's document of torch_npu.npu_rms_norm, CANN's aclnnRmsNorm. Never run on hardware.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .applied import mark
from .trial import apart, tolerance

NAME, OP = "rms_norm", "npu_rms_norm"


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model that are called RMSNorm, with their names."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            yield name, module


def reason_against(module: Any) -> str | None:
    """Return why a layer cannot be this op, as far as its attributes tell, or None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return "it has no weight of one dimension"
    if getattr(module, "bias", None) is not None:
        return "it has a bias"
    if not isinstance(epsilon(module), float):
        return "it tells no epsilon"
    code = type(module).forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount:
        return "its forward takes more than the hidden states"
    return None


def epsilon(module: Any) -> Any:
    """Return what a layer adds to the mean of squares; None where it does not tell."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def reason_by_values(module: Any, plain: Tensor, hidden: Tensor) -> str | None:
    """Return why a layer is another function than the op, told from its output, or None."""
    x = hidden.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon(module))
    allowed = tolerance(plain, hidden)
    if apart(plain, normed * module.weight.float()) <= allowed:
        return None
    if apart(plain, normed * (1 + module.weight.float())) <= allowed:
        return "it multiplies by 1 + weight"
    return "it is no plain RMSNorm"


def forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + epsilon) in the dtype that torch promotes weight and x to.

    Args:
        self: the layer; its weight is [H].
        hidden_states: [..., H].
    """
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    return torch.ops.npu.npu_rms_norm(hidden_states.to(dtype), self.weight.to(dtype), epsilon=epsilon(self))[0]


mark(forward, NAME)  # type: ignore[arg-type]
