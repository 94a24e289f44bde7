"""aten's operators for which torch-npu has kernels or formulas of its own that the CPU has not."""

import torch
from torch import Tensor

from virtual_ascend.kernel import aten_kernel, libraries


@aten_kernel
def matmul_backward(grad: Tensor, x: Tensor, other: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of both factors; torch-npu differentiates matmul as one operator."""
    left, right = x[None] if x.dim() == 1 else x, other[:, None] if other.dim() == 1 else other
    upstream = grad.unsqueeze(-2) if x.dim() == 1 else grad
    upstream = upstream.unsqueeze(-1) if other.dim() == 1 else upstream
    d_left = (upstream @ right.mT).sum_to_size(left.shape).view(x.shape) if mask[0] else None
    d_right = (left.mT @ upstream).sum_to_size(right.shape).view(other.shape) if mask[1] else None
    return d_left, d_right


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by torch's own formula: torch-npu goes to CANN from inside it, past every name."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the formula adds its mask
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[0]


libraries["aten"].impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1", allow_override=True)
