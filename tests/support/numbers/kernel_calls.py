"""Calls that launch the sampling kernels and those of the fused modules at a model's sizes, to compile them.

Nobody reads the tensors: they are memory without values.
"""

from collections.abc import Callable
from typing import Any

import torch
from hwgrpo_kernels import module_triton, sampling_triton

VOCAB, ROWS = 151936, 4
TOKENS = 2**9

Calls = dict[str, Callable[[], Any]]


def sampling_calls(dtype: torch.dtype) -> Calls:
    """Return the launches of a step by name; at a temperature, since dividing needs registers, too."""
    logits = torch.empty(ROWS, VOCAB, dtype=dtype)
    block_max = block_sum = torch.empty(ROWS, -(-VOCAB // 256))
    row = torch.empty(ROWS)
    sums = (logits, block_max, block_sum)
    return {
        "block_sums": lambda: sampling_triton.block_sums(logits, 0.7),
        "pick": lambda: sampling_triton.pick(*sums, row, row, 0.7),
        "pick greedy": lambda: sampling_triton.pick(*sums, None, None, 1.0),
        "kept_sums": lambda: sampling_triton.kept_sums(*sums, 50, 0.9, 0.05, 0.7),
        "kept_sums top_k": lambda: sampling_triton.kept_sums(*sums, 50, 1.0, 0.0, 1.0),
        "kept_sums top_p": lambda: sampling_triton.kept_sums(*sums, 0, 0.9, 0.0, 1.0),
        "kept_sums min_p": lambda: sampling_triton.kept_sums(*sums, 0, 1.0, 0.05, 1.0),
    }


def norm_calls(hidden: int, dtype: torch.dtype) -> Calls:
    """Return calls of norms with their gradients: each launches two kernels.

    Args:
        hidden: H.
        dtype: of activations.
    """

    def vectors(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(TOKENS, hidden, dtype=dtype, requires_grad=True)

    weight = torch.empty(hidden, requires_grad=True)

    def rms_norm() -> None:
        module_triton.rms_norm(vectors(dtype), weight, 1e-6).sum().backward()

    def rms_norm_for_linears() -> None:
        """In the compute dtype from an fp32 residual stream, read by queries, keys and values with adapters."""
        backward(module_triton.rms_norm_copies(vectors(), weight, 1e-6, dtype, module_triton.MOST_COPIES))

    def add_rms_norm() -> None:
        """An update in 16 bits, and a norm that gate and up read."""
        backward(module_triton.add_rms_norm(vectors(), vectors(dtype), weight, 1e-6, dtype, 2))

    def backward(outputs: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])

    return {each.__name__: each for each in (rms_norm, rms_norm_for_linears, add_rms_norm)}


def other_module_calls(dtype: torch.dtype) -> Calls:
    """Return calls of the gate and of the rotation with their gradients: each launches two kernels."""

    def swiglu() -> None:
        gate, up = (torch.empty(2**6, 1792, dtype=dtype, requires_grad=True) for _ in range(2))
        module_triton.swiglu(gate, up).sum().backward()

    def rotary() -> None:
        x = torch.empty(1, 2**6, 14, 128, dtype=dtype).transpose(1, 2).requires_grad_()
        cos, sin = (torch.empty(1, 2**6, 128) for _ in range(2))
        module_triton.rotate_halves(x, cos, sin).sum().backward()

    return {each.__name__: each for each in (swiglu, rotary)}
