"""The four fused ops of torch-npu as its documents define them, on the host, for tests of what calls them.

Each is written from the document of the op, checks what the document demands of its arguments, computes in fp32 (fp64
for fp64) and rounds once. They are composites of torch's own ops, so that autograd differentiates them on any device.

    with registered():
        torch.ops.npu.npu_rms_norm(...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SCHEMAS = {
    "npu_rms_norm": "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": (
        "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
    ),
    "npu_swiglu": "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_fusion_attention": (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
        'bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, '
        "Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
}
"""As torch-npu 2.10, 2.13 and 2.14 ship them; a slow test compares them with the wheel."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EVERYTHING = 2147483647
calls: Counter[str] = Counter()
"""How often each op was called."""


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Return y [..., H] and the reciprocal root [..., 1] fp32."""
    _demand("npu_rms_norm", x, gamma)
    _check(gamma.shape == x.shape[-gamma.dim() :], f"gamma {tuple(gamma.shape)} is no end of {tuple(x.shape)}")
    wide = x.float()
    reciprocal = 1.0 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal * gamma.float()).to(x.dtype), reciprocal


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return r1 * x + r2 * (x turned by a quarter), x [B, N, S, D]."""
    _demand("npu_rotary_mul", x, r1, r2)
    _check(x.dim() == r1.dim() == r2.dim() == 4, "four dimensions each")
    _check(r1.shape == r2.shape, "cosines and sines of one shape")
    _check(r1.shape[-1] == x.shape[-1], f"cosines of {r1.shape[-1]} for heads of {x.shape[-1]}")
    _check(x.shape[-1] % 2 == 0, "an odd head")
    _check(x.shape[-1] < 896, "heads of less than 896")
    _check(max(x.shape[:2]) < 1000, "B and N below 1000")
    _check(rotate is None, "not written here")
    if rotary_mode == "half":
        first, second = torch.chunk(x, 2, -1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        _check(rotary_mode == "interleave", rotary_mode)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (r1.float() * x.float() + r2.float() * turned.float()).to(x.dtype)


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return a * sigmoid(a) * b of the halves a and b of x."""
    _demand("npu_swiglu", x)
    _check(x.shape[dim] % 2 == 0, "an odd number of inputs")
    a, b = x.float().chunk(2, dim)
    return (a * torch.sigmoid(a) * b).to(x.dtype)


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
    keep_prob: float = 1.0,
    pre_tockens: int = EVERYTHING,
    next_tockens: int = EVERYTHING,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return attention in the layout of the query, maxima and sums of the softmax [B, N, Sq, 8], and what is unused."""
    _demand("npu_fusion_attention", query, key, value)
    unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink, dropout_mask)
    _check(all(each is None for each in unused), "not written here")
    _check(keep_prob == 1.0, "not written here")
    if input_layout == "BSND":
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    else:
        _check(input_layout == "BNSD", f"{input_layout} is not written here")
        q, k, v = query, key, value
    _check(q.shape[1] == head_num, f"head_num={head_num} for {q.shape[1]} heads of queries")
    _check(k.shape == v.shape, "key and value are of one shape")
    _check(head_num % k.shape[1] == 0, "heads are a multiple of key heads")
    k, v = (each.repeat_interleave(head_num // k.shape[1], dim=1) for each in (k, v))
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    masked = _masked(scores, atten_mask, sparse_mode, pre_tockens, next_tockens)
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(torch.float32).min)
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul(weights / total, v.float()).to(query.dtype)
    output = output.transpose(1, 2).contiguous() if input_layout == "BSND" else output
    eight = (*scores.shape[:-1], 8)
    return output, top.expand(eight), total.detach().expand(eight), query.new_empty(0), 0, 0, 0


def _masked(scores: Tensor, mask: Tensor | None, mode: int, before: int, after: int) -> Tensor | None:
    """Return True where a key is masked."""
    if mask is None:
        return None  # whatever the mode says
    _check(mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {mask.dtype}")
    batch, heads, rows, columns = scores.shape
    row = torch.arange(rows, device=scores.device)[:, None]
    column = torch.arange(columns, device=scores.device)
    if mode in (0, 1):
        _check(mask.shape[-2:] == (rows, columns), f"a mask of {tuple(mask.shape)} for scores {tuple(scores.shape)}")
        if mask.dim() != 2:
            _check(mask.shape[:2] in ((batch, heads), (batch, 1), (1, 1)), tuple(mask.shape))
        masked = mask.bool()
        if mode == 0:
            masked = masked | (row - column > before) | (column - row > after)
        return masked
    _check(mask.shape == (2048, 2048), f"mode {mode} takes the compressed mask of 2048 x 2048, not {tuple(mask.shape)}")
    _check(torch.equal(mask.bool(), torch.ones_like(mask, dtype=torch.bool).triu(1)), "True is masked OUT")
    if mode == 2:
        return column > row
    lower_right = column - (columns - rows) - row
    if mode == 3:
        return lower_right > 0
    _check(mode == 4, f"mode {mode} is not written here")
    return (lower_right > after) | (-lower_right > before)


def _demand(op: str, *tensors: Tensor) -> None:
    calls[op] += 1
    _check(tensors[0].dtype in FLOATS, f"{op} takes no {tensors[0].dtype}")
    _check(len({each.dtype for each in tensors}) == 1, f"{op} takes one dtype, not {[each.dtype for each in tensors]}")


def _check(holds: bool, message: object) -> None:
    """Raise torch-npu's error for unsupported arguments of an op."""
    if not holds:
        raise RuntimeError(message)


OPS = {each.__name__: each for each in (npu_rms_norm, npu_rotary_mul, npu_swiglu, npu_fusion_attention)}


def register(*names: str) -> torch.library.Library:
    """Define ops under torch.ops.npu, all of them when none is named; `_destroy` removes them."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name in names or OPS:
        library.define(SCHEMAS[name])
        library.impl(name, _without_autocast(OPS[name]), "CompositeImplicitAutograd")
    return library


def _without_autocast(op: Any) -> Any:
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return op(first, *args, **kwargs)

    return call


@contextmanager
def registered(*names: str) -> Iterator[None]:
    """Register the ops within the block; counts of calls restart."""
    library = register(*names)
    calls.clear()
    try:
        yield
    finally:
        library._destroy()
        for name in names or OPS:  # torch.ops keeps what it found once
            vars(torch.ops.npu).pop(name, None)
