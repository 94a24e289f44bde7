"""`row_stats` and `row_grad` for a CPU in C++ (rows_compiled.cpp), compiled on first use.

Used only if pinned or preferred, since not every machine has a compiler and compiling takes seconds.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import host_compiler
from .matrices import accumulated, has_dense_rows, with_dense_rows
from .op import Key

_SOURCES = ("rows_compiled.cpp", "rows_dtypes.h", "rows_vectors.h")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""enum Dtype of rows_dtypes.h."""
_Vectors = ctypes.c_void_p * 7


def reason_against(key: Key) -> str | None:
    """Return why compiled functions cannot run for `key` on this machine, or None."""
    if key.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"takes {names}, not {str(key.dtype).removeprefix('torch.')}"
    return host_compiler.reason_against()


def load_row_stats() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return `row_stats`, compiled.

    Raises:
        ImportError: compiling or loading failed.
    """
    _library()
    return row_stats


def load_row_grad() -> Callable[..., Tensor]:
    """Return `row_grad`, compiled.

    Raises:
        ImportError: compiling or loading failed.
    """
    _library()
    return row_grad


def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.row_stats`."""
    accumulate = accumulated(logits.dtype)
    rows, vocab = logits.shape
    logprob, row_max, log_sum = (logits.new_empty(rows, dtype=accumulate) for _ in range(3))  # custom ops share nothing
    entropy = logits.new_empty(rows if with_entropy else 0, dtype=accumulate)
    logits, targets = with_dense_rows(logits), targets.long().contiguous()
    factors = _vector(row_scale, accumulate)
    _library().hwgrpo_row_stats(
        DTYPES[logits.dtype], logits.data_ptr(), rows, vocab, logits.stride(0), targets.data_ptr(), scale, squash,
        _address(factors), _addresses(logprob, entropy if with_entropy else None, row_max, log_sum),
        torch.get_num_threads(),
    )  # fmt: skip
    return logprob, entropy, row_max, log_sum


def row_grad(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> Tensor:
    """See `definitions.row_grad`; `out` may be `logits` itself."""
    assert grad_entropy is None or entropy is not None, "an entropy gradient without entropies"
    accumulate = accumulated(logits.dtype)
    rows, vocab = logits.shape
    dense = out if has_dense_rows(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    logits, targets = with_dense_rows(logits), targets.long().contiguous()
    vectors = [
        _vector(each, accumulate)
        for each in (row_scale, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy)
    ]
    _library().hwgrpo_row_grad(
        DTYPES[logits.dtype], DTYPES[dense.dtype], logits.data_ptr(), dense.data_ptr(), rows, vocab,
        logits.stride(0), dense.stride(0), targets.data_ptr(), scale, squash, _addresses(*vectors),
        torch.get_num_threads(),
    )  # fmt: skip
    return out if dense is out else out.copy_(dense)


@cache
def _library() -> ctypes.CDLL:
    library = host_compiler.load("rows", _SOURCES)
    address, code, size, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    library.hwgrpo_row_stats.argtypes = (
        [code, address, size, size, size, address, number, number, address, _Vectors, code]
    )  # fmt: skip
    library.hwgrpo_row_grad.argtypes = (
        [code, code, address, address, size, size, size, size, address, number, number, _Vectors, code]
    )  # fmt: skip
    library.hwgrpo_row_stats.restype = library.hwgrpo_row_grad.restype = None
    return library


def _vector(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return contiguous [N] values in this dtype; gradients are often expanded from one number."""
    return None if values is None else values.to(dtype).contiguous()


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _addresses(*vectors: Tensor | None) -> ctypes.Array[ctypes.c_void_p]:
    return _Vectors(*map(_address, vectors))
