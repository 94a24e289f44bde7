"""torch-npu's fused operators, differentiated by its own formulas, against plain torch on the CPU.

The kernels are the host's. What is torch-npu's here: names, defaults, the order of arguments, what a formula keeps from
the forward, and which gradient goes where.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import virtual_ascend
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
B, N, S, D, H = 2, 4, 6, 8, 32
SOME = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.4
SOME[..., 0] = False  # every query sees something


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    rows = x.float()
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-3) * gamma.float()).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def attention(visible: Tensor | None, transposed: bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) if transposed else each for each in (q, k, v))
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True)
        return result.transpose(1, 2) if transposed else result

    return attend


def fused(layout: str, mask: Tensor | None = None, **options: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = {} if mask is None else {"atten_mask": mask.to(q.device)}
        return torch.ops.npu.npu_fusion_attention(q, k, v, N, layout, scale=0.3, **masks, **options)[0]

    return attend


BNSD, GROUPED = ((B, N, S, D),) * 3, ((B, S, N, D), (B, S, N // 2, D), (B, S, N // 2, D))
LONGER = ((B, N, S, D), (B, N, S + 3, D), (B, N, S + 3, D))
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
CASES: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (
        "npu_rms_norm",
        lambda x, gamma: torch.ops.npu.npu_rms_norm(x, gamma, epsilon=1e-3)[0],
        rms_norm,
        ((B, S, H), (H,)),
    ),
    "rotary": ("npu_rotary_mul", torch.ops.npu.npu_rotary_mul, rotary, ((B, N, S, D), (1, 1, S, D), (1, 1, S, D))),
    "swiglu": ("npu_swiglu", lambda x: torch.ops.npu.npu_swiglu(x, dim=-1), swiglu, ((B, S, H),)),
    "attention": ("npu_fusion_attention", fused("BNSD"), attention(None, False), BNSD),
    "attention, a mask": (
        "npu_fusion_attention",
        fused("BNSD", SOME, sparse_mode=1),
        attention(~SOME, False),
        BNSD,
    ),
    "attention, causal, BSND, groups of heads": (
        "npu_fusion_attention",
        fused("BSND", TRIANGLE, sparse_mode=3),
        attention(CAUSAL, True),
        GROUPED,
    ),
    "attention, causal, keys before the queries": (
        "npu_fusion_attention",
        fused("BNSD", TRIANGLE, sparse_mode=3),
        attention(torch.ones(S, S + 3, dtype=torch.bool).tril(3), False),
        LONGER,
    ),
}


def run(function: Callable[..., Tensor], inputs: list[Tensor], device: str) -> tuple[Tensor, list[Tensor], str]:
    """Return the value, the gradients, and the name of the formula."""
    leaves = [each.to(device).requires_grad_() for each in inputs]
    value = function(*leaves)
    weights = torch.linspace(-1, 2, value.numel()).view(value.shape).to(value)
    gradients = torch.autograd.grad(value, leaves, weights)
    assert all(each.device.type == device for each in (value, *gradients))
    return value.detach().cpu(), [each.cpu() for each in gradients], type(value.grad_fn).__name__


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_through_torch_npus_formulas_equal_plain_torch(case: str, dtype: torch.dtype):
    op, ours, plain, shapes = CASES[case]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    before = virtual_ascend.calls.copy()
    value, gradients, formula = run(ours, inputs, "npu")
    assert formula == "".join(part.capitalize() for part in op.split("_")) + "Backward0"
    assert virtual_ascend.calls[op] == before[op] + 1
    backward = op + ("_grad" if op == "npu_fusion_attention" else "_backward")
    assert virtual_ascend.calls[backward] == before[backward] + 1
    expected, wanted, _ = run(plain, [each.float() for each in inputs], "cpu")
    for mine, right in zip((value, *gradients), (expected, *wanted), strict=True):
        assert mine.dtype == dtype
        assert (mine.float() - right).abs().max() <= TOLERANCE[dtype] * right.abs().max().clamp_min(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_prob": 0.9}, "keep_prob"),
        ({"pre_tockens": 3}, "pre_tockens"),
        ({"sparse_mode": 4}, "sparse_mode"),
        ({"mask": SOME, "sparse_mode": 2}, "2048"),
        ({"mask": ~TRIANGLE, "sparse_mode": 3}, "upper triangle"),
        ({"sparse_mode": 1}, "whole mask"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(options: dict[str, Any], said: str):
    q = torch.randn(B, N, S, D, device="npu")
    with pytest.raises(AssertionError, match=said):
        fused("BNSD", **options)(q, q, q)


META = {
    "npu_rms_norm": lambda x, y, q, m: (x, y[0, 0]),
    "npu_rms_norm_backward": lambda x, y, q, m: (x, x, y[0, 0], m[0, :, :S, :1]),
    "npu_rotary_mul": lambda x, y, q, m: (q, q[:1, :1], q[:1, :1]),
    "npu_swiglu": lambda x, y, q, m: (x,),
    "npu_swiglu_backward": lambda x, y, q, m: (x[..., : H // 2], x),
    "npu_fusion_attention": lambda x, y, q, m: (q, q, q, N, "BNSD"),
}


@pytest.mark.parametrize("op", META)
def test_kernels_give_the_shapes_and_dtypes_that_torch_npus_meta_kernels_give(op: str):
    def results(device: str) -> list[Any]:
        x, y = (torch.randn(B, S, H, dtype=torch.bfloat16, device=device) for _ in range(2))
        q = torch.randn(B, N, S, D, dtype=torch.bfloat16, device=device)
        given = META[op](x, y, q, torch.rand(1, B, S, 8, device=device))
        found = getattr(torch.ops.npu, op)(*given)
        found = found if isinstance(found, tuple) else (found,)
        return [(tuple(each.shape), each.dtype) if isinstance(each, Tensor) else type(each) for each in found]

    assert results("npu") == results("meta")
