"""Compute for the real torch-npu on a host: `import torch` loads this beside it, by an entry point of torch.backends.

aten's operators run their CPU kernels; torch-npu's fused operators have kernels here, in plain torch and fp32, under
their own names below autograd, so that torch-npu's own formulas differentiate them. Whatever else torch-npu has still
goes to CANN, where nothing computes, and fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  # the device has to be there first
from torch import Tensor
from virtual_ascend import _host

if os.environ.get("TASK_QUEUE_ENABLE") != "0":
    raise ImportError("the virtual NPU needs TASK_QUEUE_ENABLE=0: otherwise a second thread races these kernels")

calls: Counter[str] = Counter()
"""Fused operator -> how often its kernel ran."""

MEMORY = ("empty", "new_empty", "set_", "resize", "record_stream", "is_pinned", "_pin_memory", "pin_memory")
MEMORY += ("_local_scalar_dense", "_copy_from", "is_set_to", "set_data", "copy_", "clone", "contiguous", "_to_copy")
"""Beginnings of aten's operators that make, move or look at memory: torch-npu's own, or those of _host."""


def host_calls() -> dict[str, int]:
    """Return how often each of aten's operators ran on the host."""
    return _host.calls()


def _give_over() -> list[str]:
    """Give every operator that torch-npu has, that computes, and that the CPU has too, over to the CPU."""
    names = []
    schemas = {f"{each.name}.{each.overload_name}".rstrip("."): each for each in torch._C._jit_get_all_schemas()}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, name = qualified.partition("::")
        if space != "aten" or name.startswith(MEMORY) or qualified not in schemas:
            continue
        aliases = [each.alias_info for each in schemas[qualified].arguments if each.alias_info is not None]
        views = any(not each.is_write for each in aliases)
        keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
        if not views and any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in keys):
            names.append(name)
    _host.give_over(names)
    return names


given_over = _give_over()
_libraries = {space: torch.library.Library(space, "IMPL") for space in ("npu", "aten")}


def _kernel(function: Callable[..., Any], space: str = "npu") -> Callable[..., Any]:
    """Register a kernel that takes and returns tensors of the host, under its own name."""
    name = function.__name__

    def run(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        with torch.no_grad():
            results = function(*map(_to_host, given), **{key: _to_host(value) for key, value in named.items()})
        if isinstance(results, tuple):
            return tuple(map(_to_device, results))
        return _to_device(results)

    _libraries[space].impl(name, run, "PrivateUse1", allow_override=True)
    return function


def _aten_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel of an operator for which torch-npu has a formula of its own, and the CPU has none."""
    return _kernel(function, "aten")


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.device.type == "npu", "a fused operator was given a tensor of the host"
        return value.cpu()
    return value


def _to_device(value: Any) -> Any:
    return value.to("npu") if isinstance(value, Tensor) else value


@_aten_kernel
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
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[0]


_libraries["aten"].impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1", allow_override=True)


@_kernel
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return gamma * x / rms(x) and 1 / rms(x), [..., 1] in fp32."""
    rows = x.float()
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows * scale * gamma.float()).to(x.dtype), scale


@_kernel
def npu_rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gamma from what the forward kept; d rstd/dx = -rstd^3 x / H."""
    upstream, normed = dy.float(), x.float() * rstd
    inner = upstream * gamma.float()
    dx = rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (upstream * normed).flatten(0, -2).sum(0).to(gamma.dtype)


def _turned(x: Tensor, mode: str) -> Tensor:
    assert mode == "half", f"no kernel for rotary_mode={mode!r}"
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1)


@_kernel
def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """Return x * r1 + (-x2, x1) * r2."""
    assert rotate is None
    return (x.float() * r1.float() + _turned(x.float(), rotary_mode) * r2.float()).to(x.dtype)


@_kernel
def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and both factors; turning is minus its own transpose."""
    upstream = grad.float()
    dx = upstream * r1.float() - _turned(upstream * r2.float(), rotary_mode)
    d1, d2 = upstream * x.float(), upstream * _turned(x.float(), rotary_mode)
    return dx.to(x.dtype), d1.sum_to_size(r1.shape).to(r1.dtype), d2.sum_to_size(r2.shape).to(r2.dtype)


@_kernel
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu(first half) * second half."""
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@_kernel
def npu_swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of x; silu'(a) = s(a) (1 + a (1 - s(a)))."""
    gate, up = x.float().chunk(2, dim)
    upstream, sigmoid = grad_output.float(), gate.sigmoid()
    d_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, upstream * gate * sigmoid], dim).to(x.dtype)


LAYOUTS = {"BNSD": "bnsd", "BSND": "bsnd"}
TRIANGLE = 2048  # sides of the compressed mask that sparse modes 2 to 4 take


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """Return [B, N, S, D] of either layout, in fp32; its own inverse but for the dtype."""
    assert layout in LAYOUTS, f"no kernel for input_layout={layout!r}"
    return x.float() if layout == "BNSD" else x.float().transpose(1, 2)


def _masked_out(mask: Tensor | None, mode: int, queries: int, keys: int) -> Tensor | None:
    """Return what no query may see, True where masked out, as CANN documents the modes of FlashAttentionScore."""
    if mode in (0, 1):
        assert not (mode == 1 and mask is None), "sparse_mode 1 needs the whole mask"
        return None if mask is None else mask.bool()
    assert mode in (2, 3), f"no kernel for sparse_mode={mode}"
    triangle = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool).triu(1)
    assert mask is not None and mask.shape[-2:] == triangle.shape, "sparse modes 2 and 3 need the mask of 2048 x 2048"
    assert torch.equal(mask.bool().view_as(triangle), triangle), "the compressed mask is the upper triangle"
    shift = keys - queries if mode == 3 else 0  # 2: from the left upper corner; 3: to the right lower one
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + shift)


def _scores(q: Tensor, k: Tensor, scale: float, masked: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    return scores if masked is None else scores.masked_fill(masked, float("-inf"))


def _supported(options: dict[str, Any]) -> None:
    """Refuse what these kernels do not compute; a value that is ignored would be a wrong result."""
    harmless = {"keep_prob": 1.0, "inner_precise": 0, "gen_mask_parallel": True, "sync": False, "seed": 0, "offset": 0}
    harmless |= {"softmax_layout": "", "numels": 0}
    window = {"pre_tockens": 2**31 - 1, "next_tockens": 2**31 - 1}
    for name, value in options.items():
        ignored = options["sparse_mode"] in (1, 2, 3) and name in window  # CANN reads windows in modes 0 and 4 only
        expected = value if name == "sparse_mode" or ignored else {**harmless, **window}.get(name)
        assert value == expected, f"no kernel for {name}={value!r}"


@_kernel
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    **options: Any,
) -> tuple[Any, ...]:
    """Return attention, and per row its maximum and sum of exponentials, [B, N, S, 8] in fp32."""
    assert pse is None and padding_mask is None
    options.setdefault("sparse_mode", 0)
    _supported(options)
    q, k, v = (_heads_first(each, input_layout) for each in (query, key, value))
    assert q.shape[1] == head_num, f"head_num={head_num}, and there are {q.shape[1]} heads"
    k, v = (each.repeat_interleave(head_num // each.shape[1], 1) for each in (k, v))
    scores = _scores(q, k, scale, _masked_out(atten_mask, options["sparse_mode"], q.shape[2], k.shape[2]))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    result = _heads_first(weights / total @ v, input_layout).to(query.dtype).contiguous()
    top, total = (each.expand(*each.shape[:-1], 8).contiguous() for each in (top, total))
    return result, top, total, query.new_empty(0), 0, 0, 0


@_kernel
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    softmax_in: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value from what the forward kept; there are none of pse and sink."""
    assert pse is None and padding_mask is None
    options.setdefault("sparse_mode", 0)
    _supported(options)
    q, k, v, upstream, out = (_heads_first(each, input_layout) for each in (query, key, value, dy, attention_in))
    group = head_num // k.shape[1]
    k_all, v_all = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = _scores(q, k_all, scale_value, _masked_out(atten_mask, options["sparse_mode"], q.shape[2], k.shape[2]))
    weights = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    d_scores = weights * (upstream @ v_all.transpose(-1, -2) - (upstream * out).sum(-1, keepdim=True)) * scale_value
    dq, dk, dv = d_scores @ k_all, d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ upstream
    dk, dv = (each.unflatten(1, (-1, group)).sum(2) for each in (dk, dv))
    back = (_heads_first(each, input_layout).contiguous().to(query.dtype) for each in (dq, dk, dv))
    return *back, query.new_empty(0), query.new_empty(0)


def _autoload() -> None:
    """Called by torch when it loads its entry points; importing this has done the work."""
