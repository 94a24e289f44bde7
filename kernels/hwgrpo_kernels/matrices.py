"""Helpers for the row ops: accumulation dtype, dense rows, weights of zero."""

import torch
from torch import Tensor


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics of a matrix accumulate in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_dense_rows(matrix: Tensor) -> bool:
    """Return whether the rows of a matrix [N,V] are contiguous."""
    return matrix.shape[1] == 1 or matrix.stride(1) == 1


def with_dense_rows(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy if its rows are not dense."""
    return matrix if has_dense_rows(matrix) else matrix.contiguous()


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights * values, and 0 where the weight is 0, even if the value is infinite."""
    return torch.where(weights == 0, 0.0, weights * values)
