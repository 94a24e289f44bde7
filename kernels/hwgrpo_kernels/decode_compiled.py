"""`decode_attention` and a decode step's norm for a CPU in C++ (decode_compiled.cpp), compiled on first use."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import host_compiler
from .rows_compiled import DTYPES

_SOURCES = ("decode_compiled.cpp", "rows_dtypes.h", "rows_vectors.h")
_Tensors = ctypes.c_void_p * 12
_Sizes = ctypes.c_int64 * 20


def load_decode_attention() -> Callable[..., Tensor]:
    """Return `decode_attention`, compiled.

    Raises:
        ImportError: compiling or loading failed.
    """
    _library()
    return decode_attention


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, offset: Tensor, prompts: Tensor,
    prompt_of: Tensor, prompt_length: Tensor, responses: Tensor, length: Tensor, scaling: float,
) -> Tensor:  # fmt: skip
    """See `decode_definitions.decode_attention`.

    Raises:
        IndexError: a length, a prompt or a position is out of range; nothing is written then.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    (rows, queries, size), heads = query.shape, key.shape[1]
    assert queries % heads == size % 2 == 0
    assert cos.shape == sin.shape == (len(cos), size)
    assert prompts.stride()[3:] == responses.stride()[3:] == (size, 1), "tokens of a cache are neighbours"
    assert query.dtype == key.dtype == value.dtype == prompts.dtype == responses.dtype
    assert cos.dtype == sin.dtype
    cos, sin = cos.contiguous(), sin.contiguous()
    places = [each.contiguous() for each in (offset, prompt_of, prompt_length, length)]
    assert all(each.dtype == torch.int64 and each.shape == (rows,) for each in places)
    out = query.new_empty(rows, queries * size)
    tensors = (query, key, value, cos, sin, prompts, responses, out, *places)
    sizes = (
        rows, heads, queries // heads, size, prompts.shape[3], responses.shape[3], prompts.shape[2], len(cos),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *prompts.stride()[:3], *responses.stride()[:3],
    )  # fmt: skip
    failed = _library().hwgrpo_decode_attention(
        DTYPES[query.dtype], DTYPES[cos.dtype], _Tensors(*[each.data_ptr() for each in tensors]), _Sizes(*sizes),
        scaling, parallel_function(), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise IndexError("decode_attention: a length, a prompt or a position is out of range")
    return out


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * hidden / sqrt(mean(hidden^2) + eps), rounded once, as torch's `rms_norm` on a CPU.

    Args:
        hidden: [B,size]; rows may lie apart.
        weight: [size].
        eps: added to the mean.
    """
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    rows, columns = hidden.shape
    assert weight.shape == (columns,)
    weight, out = weight.contiguous(), hidden.new_empty(rows, columns)
    _library().hwgrpo_rms_norm(
        DTYPES[hidden.dtype], DTYPES[weight.dtype], hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns,
        hidden.stride(0), eps, parallel_function(), torch.get_num_threads(),
    )  # fmt: skip
    return out


@cache
def parallel_function() -> int | None:
    """Return the address of `GOMP_parallel` in torch's own OpenMP runtime; None: one thread computes.

    It takes (function, its argument, number of threads, 0), and returns after all threads have called the function.
    GCC's runtime has it, and so have LLVM's and Intel's. Threads of another runtime would compete for the cores.
    """
    try:
        torch_library: Any = ctypes.CDLL(torch._C.__file__)  # a name is looked up in all that it is linked with
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def _library() -> ctypes.CDLL:
    library = host_compiler.load("decode", _SOURCES)
    address, code, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.hwgrpo_decode_attention.argtypes = [code, code, _Tensors, _Sizes, ctypes.c_double, address, code]
    library.hwgrpo_decode_attention.restype = code
    library.hwgrpo_rms_norm.argtypes = [code, code, *[address] * 3, *[size] * 3, ctypes.c_double, address, code]
    library.hwgrpo_rms_norm.restype = None
    return library
