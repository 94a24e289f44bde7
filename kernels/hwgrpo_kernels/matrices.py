"""What all row ops ask of a matrix: the dtype its statistics accumulate in, and rows whose entries are neighbours."""

import torch
from torch import Tensor


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics of a matrix accumulate in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_dense_rows(matrix: Tensor) -> bool:
    """Whether neighbours in a row [N,V] are neighbours in memory."""
    return matrix.shape[1] == 1 or matrix.stride(1) == 1


def with_dense_rows(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy if its rows are not dense."""
    return matrix if has_dense_rows(matrix) else matrix.contiguous()


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights * values, where a weight of 0 leaves nothing even of infinity."""
    return torch.where(weights == 0, 0.0, weights * values)
