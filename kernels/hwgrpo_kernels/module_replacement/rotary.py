"""Rotary embeddings of queries and keys by `npu_rotary_mul(x, cos, sin, rotary_mode="half")`, or in Triton.

transformers rotates by a function `apply_rotary_pos_emb` of each model's file, which the forward of every attention
layer looks up among that file's globals. Replacing it there would change every model of the process. So each layer
gets its own forward: the same byte code over a copy of those globals in which that one name is the fused function. The
copy is made when the module is replaced; later changes of the file's globals do not reach it.

Replaces layers that rotate the halves of full heads: x * cos + (-x2, x1) * sin. Interleaved pairs (Cohere) and partial
rotation (GLM-4) are recognized by their results and skipped.

Source: torch-npu's document of torch_npu.npu_rotary_mul, CANN's aclnnRotaryPositionEmbedding. That op has
never run on hardware.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .compute_dtype import autocast_dtype
from .fused_forwards import in_triton, mark
from .self_test import relative_difference, tolerance

NAME, OP = "rotary", "npu_rotary_mul"
FUNCTION = "apply_rotary_pos_emb"
MAX_ROWS, MAX_HEAD_SIZE = 999, 894
"""Limits of torch-npu's op: rows or heads, and the head size."""


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sub-modules of a model whose forward names a function `apply_rotary*`."""
    for name, module in model.named_modules():
        code = getattr(_innermost(type(module).forward), "__code__", None)
        if code is not None and any("apply_rotary" in each for each in code.co_names):
            yield name, module


def reason_against(module: nn.Module) -> str | None:
    """Return why the rotation in a layer's forward cannot be replaced, or None."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _innermost(forward) is not forward:
        return "its forward is wrapped by another function"
    if FUNCTION not in forward.__code__.co_names or not callable(forward.__globals__.get(FUNCTION)):
        return f"its forward does not rotate by a function {FUNCTION} of its file"
    return None


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def plain_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the rotation function of a layer."""
    return type(module).forward.__globals__[FUNCTION]  # type: ignore[attr-defined]


def forward_with(module: nn.Module, rotate: Callable[..., tuple[Tensor, Tensor]]) -> FunctionType:
    """Return a layer's forward with `apply_rotary_pos_emb` replaced."""
    plain: Any = type(module).forward
    names = {**plain.__globals__, FUNCTION: rotate}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    forward.__annotations__ = plain.__annotations__
    mark(forward, NAME)
    return forward


def reason_from_values(
    plain: tuple[Tensor, Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int
) -> str | None:
    """Return how a layer's rotation differs from the op's, judged by its results, or None."""
    if cos.shape[-1] != q.shape[-1] or cos.dim() != q.dim() - 1:
        return f"it rotates {cos.shape[-1]} of the {q.shape[-1]} elements of a head"
    for x, rotated in zip((q, k), plain, strict=True):
        first, second = x.float().chunk(2, dim=-1)
        halves = x.float() * cos.float().unsqueeze(dim) + torch.cat([-second, first], -1) * sin.float().unsqueeze(dim)
        if not relative_difference(rotated, halves) <= tolerance(x, rotated):
            return "it does not rotate halves of a head (it may rotate interleaved pairs)"
    return None


def rotation_by_op(
    plain: Callable[..., tuple[Tensor, Tensor]], in_compute_dtype: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a fused `apply_rotary_pos_emb`, which falls back to `plain` beyond the op's limits.

    Args:
        plain: the model's own.
        in_compute_dtype: whether it rounds to autocast's dtype, as attention would; in Triton only.

    Args of the returned function:
        q: [B, heads, L, D].
        k: [B, key-value heads, L, D].
        cos, sin: [B or 1, L, D].
        unsqueeze_dim: the dimension of heads.

    It returns both rotated, in the dtype that torch promotes them and `cos` to, or in autocast's.
    """

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if in_triton(q.device.type):
            if unsqueeze_dim != 1:
                return plain(q, k, cos, sin, unsqueeze_dim)
            from hwgrpo_kernels.module_triton import rotate_halves  # imports triton

            dtype = autocast_dtype(q) if in_compute_dtype else None
            return rotate_halves(q, cos, sin, dtype), rotate_halves(k, cos, sin, dtype)
        if max(q.shape[0], q.shape[unsqueeze_dim]) > MAX_ROWS or q.shape[-1] > MAX_HEAD_SIZE:
            return plain(q, k, cos, sin, unsqueeze_dim)
        dtype = torch.promote_types(q.dtype, cos.dtype)
        cos, sin = cos.unsqueeze(unsqueeze_dim).to(dtype), sin.unsqueeze(unsqueeze_dim).to(dtype)
        rotated_q = torch.ops.npu.npu_rotary_mul(q.to(dtype), cos, sin, rotary_mode="half")
        return rotated_q, torch.ops.npu.npu_rotary_mul(k.to(dtype), cos, sin, rotary_mode="half")

    return rotate
