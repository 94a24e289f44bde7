"""Kernels of torch-npu's fused operators, in plain torch and fp32."""

import torch
from torch import Tensor

from virtual_ascend.kernel import kernel


@kernel
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return gamma * x / rms(x) and 1 / rms(x), [..., 1] in fp32."""
    rows = x.float()
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows * scale * gamma.float()).to(x.dtype), scale


@kernel
def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in fp32, of gamma from what the forward kept; d rstd/dx = -rstd^3 x / H."""
    upstream, normed = dy.float(), x.float() * rstd
    inner = upstream * gamma.float()
    dx = rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (upstream * normed).flatten(0, -2).sum(0)


def _turned(x: Tensor, mode: str) -> Tensor:
    assert mode == "half", f"no kernel for rotary_mode={mode!r}"
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1)


@kernel
def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return x * r1 + (-x2, x1) * r2."""
    assert rotate is None
    return (x.float() * r1.float() + _turned(x.float(), rotary_mode) * r2.float()).to(x.dtype)


@kernel
def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and both factors; turning is minus its own transpose."""
    upstream = grad.float()
    dx = upstream * r1.float() - _turned(upstream * r2.float(), rotary_mode)
    d1, d2 = upstream * x.float(), upstream * _turned(x.float(), rotary_mode)
    return dx.to(x.dtype), d1.sum_to_size(r1.shape).to(r1.dtype), d2.sum_to_size(r2.shape).to(r2.dtype)


@kernel
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half) * second half."""
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@kernel
def npu_swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of x; silu'(a) = s(a) (1 + a (1 - s(a)))."""
    gate, up = x.float().chunk(2, dim)
    upstream, sigmoid = grad_output.float(), gate.sigmoid()
    d_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, upstream * gate * sigmoid], dim).to(x.dtype)


@kernel
def npu_fused_linear_online_max_sum(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Return per row of x @ weight.T: maximum, sum of exponentials above it, and the target's distance from it."""
    assert not return_logits
    logits = (x.float() @ weight.float().T).to(x.dtype).float()  # tiles leave the cube cores in the input's dtype
    top = logits.amax(1)
    distance = logits - top[:, None]
    outside = (target < vocab_start_index) | (target >= vocab_end_index)
    place = (target - vocab_start_index).masked_fill(outside, 0)
    predicted = distance.gather(1, place[:, None])[:, 0].masked_fill(outside, 0.0)
    bits = torch.zeros(-(-len(target) // 8), dtype=torch.uint8)
    return top, distance.exp().sum(1), predicted, bits, place, logits.new_empty(0)
