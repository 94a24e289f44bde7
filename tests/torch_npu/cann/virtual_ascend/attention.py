"""The kernel of `npu_fusion_attention` and of its gradient, as CANN documents FlashAttentionScore, in fp32.

What it does not compute it refuses: a value that were ignored would be a wrong result.
"""

from typing import Any

import torch
from torch import Tensor

from virtual_ascend.kernel import kernel

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
    assert mask is not None, "sparse modes 2 and 3 need the mask of 2048 x 2048"
    assert mask.shape[-2:] == triangle.shape, "sparse modes 2 and 3 need the mask of 2048 x 2048"
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


@kernel
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
    assert pse is None
    assert padding_mask is None
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


@kernel
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
    assert pse is None
    assert padding_mask is None
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
