"""Compute in fp64 what a model's code computes in less, and the effect of rounding each operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hwgrpo.models.rounding import unit_of_sum

LOWER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
FP32 = torch.finfo(torch.float32).eps
CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

SUMS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "convolution", "convolution_backward", "_grouped_mm"}
"""Operations whose result sums products over the last dimension of the first operand (convolutions: of the weight)."""
REDUCTIONS = {"sum", "mean", "var", "std", "cumsum", "_softmax", "_softmax_backward_data", "_log_softmax", "logsumexp"}
"""Operations whose result depends on sums over a dimension."""
EXACT = {
    *("clone", "_to_copy", "copy_", "zero_", "fill_", "cat", "stack", "index", "index_select", "gather", "embedding"),
    *(
        "where",
        "masked_fill",
        "masked_fill_",
        "neg",
        "abs",
        "relu",
        "maximum",
        "minimum",
        "amax",
        "max",
        "topk",
        "sort",
    ),
    *("clamp", "clamp_min", "constant_pad_nd", "tril", "triu", "repeat", "roll", "flip", "scatter", "index_put_"),
    *("zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
    *("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "scalar_tensor", "lift_fresh"),
    *("_unsafe_view", "index_put", "repeat_interleave"),
    *("floor", "ceil", "round", "trunc"),
    *("slice_backward", "select_backward", "detach_", "sign", "eye", "_unsafe_index", "index_fill", "unfold_backward"),
}
"""Operations that copy, select, fill or return whole numbers: nothing is rounded."""


class _Fp64Functions(TorchFunctionMode):
    """Replaces floating dtypes in calls of torch functions by fp64."""

    is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if func in CASTS:
            return args[0].double()
        args = [LOWER.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        kwargs = {} if kwargs is None else kwargs
        if kwargs.get("dtype") in LOWER:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def in_fp64() -> Iterator[None]:
    """Compute in fp64 within the block, casts to fp32 in the called code included, as of norms and softmax."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Fp64Functions():
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def in_own_dtypes() -> Iterator[None]:
    """Leave dtypes as they are, and fp32 the default, within a block of `in_fp64`, as code that reads files needs."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    _Fp64Functions.is_paused = True
    try:
        yield
    finally:
        _Fp64Functions.is_paused = False
        torch.set_default_dtype(default)


class Precision(NamedTuple):
    """How a device computes products."""

    dtype: torch.dtype
    """Products of fp32 operands round after each term of a sum, those of other dtypes sum in fp32."""
    rounds_embeddings: bool = False
    """Whether what embeddings look up is rounded to it."""
    rounds_results: bool = False
    """Whether the results of other operations than products and sums are."""


class Rounded(TorchDispatchMode):
    """Changes the result of each operation by up to one rounding, up or down, in forward and backward passes.

    Args:
        precision: whose rounding.
        seed: of the changes.
    """

    def __init__(self, precision: Precision, seed: int) -> None:
        super().__init__()
        self._dtype = precision.dtype
        eps = torch.finfo(self._dtype).eps
        self._exact = EXACT - {"embedding"} if precision.rounds_embeddings else EXACT
        self._elementwise = (eps if precision.rounds_results else FP32) / 2
        self._lookup = eps / 2
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in self._exact or func.is_view:
            return result
        unit = self._unit(name, args)

        def change(value: torch.Tensor) -> torch.Tensor:
            if not value.is_floating_point():
                return value
            # in place: the gradient of a large matrix takes longer to allocate than to multiply
            factor = torch.rand(value.shape, generator=self._generator, dtype=value.dtype)
            factor.mul_(2 * unit).add_(1 - unit)
            return value.mul_(factor) if func._schema.is_mutable else factor.mul_(value)

        if isinstance(result, torch.Tensor):
            return change(result)
        return tree_map_only(torch.Tensor, change, result)

    def _unit(self, name: str, args: Any) -> float:
        if name in SUMS:
            operand = args[1] if name in ("addmm", "baddbmm", "addbmm", "convolution") else args[0]
            terms = operand[0].numel() if name.startswith("convolution") else operand.shape[-1]
            return unit_of_sum(self._dtype, terms)
        if name in REDUCTIONS:
            return FP32 / 2 * math.sqrt(max(args[0].shape, default=1))
        return self._lookup if name == "embedding" else self._elementwise
