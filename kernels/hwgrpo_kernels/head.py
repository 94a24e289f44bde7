"""The GEMMs of the LM head on chunks of rows: logits, and dX, dW and db from their gradient."""

from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .chunks import even_chunks
from .matrices import accumulated

_ACCESS_BYTES = 16  # the widest access of one thread on every GPU
_TILE_BYTES = 64  # a row of an AMX tile
_CHUNKS_PER_PRODUCT = 2  # for fp32 logits: 16-bit gradients of two chunks take the memory of one chunk's logits
_PRODUCT_ENTRIES = 2**26  # of dW per product, if a GEMM cannot accumulate into it


def keeps_16_bit_operands(compute_dtype: torch.dtype, logits_dtype: torch.dtype, device_type: str) -> bool:
    """Return whether the head's GEMMs write logits wider than their operands."""
    return logits_dtype != compute_dtype and multiplies_into_fp32(device_type, compute_dtype)


def operand_dtype(compute_dtype: torch.dtype, logits_dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype in which the GEMMs read values of the compute dtype."""
    if keeps_16_bit_operands(compute_dtype, logits_dtype, device_type):
        return compute_dtype
    return logits_dtype  # the same product: 16-bit values are exact in fp32


def logits_buffers(compute_dtype: torch.dtype, logits_dtype: torch.dtype, device_type: str) -> int:
    """Return the logits buffers per chunk: the chunk's own, and gradients that await their GEMM."""
    return 2 if keeps_16_bit_operands(compute_dtype, logits_dtype, device_type) else 1


def multiplies_into_fp32(device_type: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether `torch.mm(a, b, out_dtype=fp32)` of 16-bit operands returns their fp32 accumulator."""
    return reason_against_fp32_products(device_type, dtype) is None


def reason_against_fp32_products(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why 16-bit operands have no products in fp32, or None: CUDA has them, ROCm where a probe works."""
    if device_type != "cuda":
        return f"torch.mm has no out_dtype on {device_type}"
    return None if torch.version.hip is None else probe_fp32_products(torch.device(device_type), dtype)


@cache
def probe_fp32_products(device: torch.device, dtype: torch.dtype) -> str | None:
    """Multiply small matrices into padded rows, as the head does; return what is wrong, or None.

    ROCm builds of torch refused such products until September 2025 (pytorch PR 161540), and a first version set the
    wrong type of the result (PR 162600). Only values decide: a choice by time would differ from run to run, and with it
    chunks and rounding. The values are those of one small shape: no other has been computed on an AMD GPU.
    """
    try:
        left, weight, exact = _probe_operands(device, dtype)
        product = empty_rows(exact.shape[0], exact.shape[1], torch.float32, device)
        torch.mm(left, weight.T, out_dtype=torch.float32, out=product)
        return _difference(product, exact)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).partition("\n")[0]


@cache
def adds_into_fp32(device: torch.device) -> bool:
    """Return whether `torch.addmm` accumulates 16-bit operands into fp32 here, as newer CUDA builds do."""
    if not multiplies_into_fp32(device.type):
        return False
    left, weight, exact = _probe_operands(device, torch.bfloat16)
    total = torch.ones(exact.shape, device=device)
    try:
        torch.addmm(total, left, weight.T, out_dtype=torch.float32, out=total)
        return _difference(total, exact + 1) is None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the sum must have the operands' dtype
        return False


def _probe_operands(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands [16,16] and [13,16], and their product [16,13] fp32, exact in any order but in no 16 bits."""
    left = torch.arange(1.0, 17.0)[:, None].expand(16, 16)
    weight = torch.full((13, 16), 2.0**-12)
    weight[:, 0] = torch.arange(1.0, 14.0)
    return left.to(device, dtype), weight.to(device, dtype), left @ weight.T


def _difference(found: Tensor, exact: Tensor) -> str | None:
    error = (found.cpu() - exact).abs().max().item()
    return None if error == 0 else f"torch.mm with out_dtype=torch.float32 is wrong by {error:.3g} where it is exact"


def row_stride(columns: int, dtype: torch.dtype, device_type: str) -> int:
    """Return the row stride in elements of a buffer of `empty_rows`: a multiple of 16 bytes.

    Row kernels then read 16 bytes at a time and GEMMs keep their fast paths for every V; BLAS writes such rows in place
    by its leading dimension. Whether Ascend's GEMMs do is unknown, so rows are dense there.

    On a CPU it is 64 bytes: oneDNN's bf16 products on AMX (3.12, in torch 2.13) read a row to the end of its last tile
    and multiply the elements beyond the row by zero, so that a NaN of the next row would enter this one's result.
    """
    bytes_ = {"npu": dtype.itemsize, "cpu": _TILE_BYTES}.get(device_type, _ACCESS_BYTES)
    per_access = max(1, bytes_ // dtype.itemsize)
    return -(-columns // per_access) * per_access


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer [R,C] with stride `row_stride`; the padding between rows is zero and never written.

    It is zero because a GEMM may read it; see `row_stride`.
    """
    buffer = torch.empty(rows, row_stride(columns, dtype, device.type), dtype=dtype, device=device)
    buffer[:, columns:].zero_()
    return buffer[:, :columns]


def weight_operand(weight_VH: Tensor, compute_dtype: torch.dtype, logits_dtype: torch.dtype) -> Tensor:
    """Return a head's weight as its GEMMs read it: the weight itself, or a copy rounded to the compute dtype.

    Args:
        weight_VH: [V,H].
        compute_dtype: dtype of the GEMM operands.
        logits_dtype: dtype of the logits.
    """
    dtype = operand_dtype(compute_dtype, logits_dtype, weight_VH.device.type)
    return weight_VH.detach().to(compute_dtype).to(dtype)


class Head:
    """The head's weight and bias, cast once for all chunks of a call.

    Args:
        weight_VH: [V,H].
        bias_V: [V] or None.
        compute_dtype: dtype of the GEMM operands.
        logits_dtype: dtype of the logits; fp32 with 16-bit operands keeps the product's fp32 accumulator.
        operand_VH: [V,H] from `weight_operand`, to share one cast between calls; None casts here.
    """

    def __init__(
        self,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        compute_dtype: torch.dtype,
        logits_dtype: torch.dtype,
        operand_VH: Tensor | None = None,
    ) -> None:
        weight = weight_operand(weight_VH, compute_dtype, logits_dtype) if operand_VH is None else operand_VH
        self.out_dtype = logits_dtype if weight.dtype != logits_dtype else None
        self.weight_VH = weight
        self.bias_V = None if bias_V is None else bias_V.detach().to(logits_dtype)
        self.logits_dtype = logits_dtype
        self._buffer: Tensor | None = None
        self._reserved = 0

    def reserve(self, rows: int) -> None:
        """Size the buffer for chunks of up to this many rows, so that a longer chunk needs no second one."""
        self._reserved = rows

    @property
    def vocab(self) -> int:
        """V."""
        return self.weight_VH.shape[0]

    def with_own_buffer(self) -> "Head":
        """Return the same head with another logits buffer."""
        other = copy(self)
        other._buffer = None
        return other

    def operand(self, hidden_RH: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """Return hidden states rounded to the compute dtype, in the dtype the GEMMs take."""
        return hidden_RH.detach().to(compute_dtype).to(self.weight_VH.dtype)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return raw logits [R,V] in a buffer of `empty_rows` that the next call overwrites.

        Args:
            hidden_RH: [R,H] from `operand`.
        """
        rows = hidden_RH.shape[0]
        if self._buffer is None or self._buffer.shape[0] < rows:
            self._buffer = None  # frees its memory for the next
            self._buffer = empty_rows(max(rows, self._reserved), self.vocab, self.logits_dtype, hidden_RH.device)
        buffer = self._buffer[:rows]
        if self.out_dtype is not None:
            torch.mm(hidden_RH, self.weight_VH.T, out_dtype=self.out_dtype, out=buffer)
            return buffer if self.bias_V is None else buffer.add_(self.bias_V)
        if self.bias_V is None:
            return torch.mm(hidden_RH, self.weight_VH.T, out=buffer)
        return torch.addmm(self.bias_V, hidden_RH, self.weight_VH.T, out=buffer)


class HeadGradients:
    """Gradients of hidden states, weight and bias, accumulated chunk by chunk; dW and db in fp32 at least.

    Where GEMMs cannot return fp32 (all but CUDA), a chunk's dW is rounded to 16 bits before it is added.

    Args:
        head: the head that made the logits.
        hidden_NH: from `Head.operand`.
        chunk_rows: the largest number of rows per chunk.
        hidden, weight, bias: whether each gradient is computed.
    """

    def __init__(
        self, head: Head, hidden_NH: Tensor, chunk_rows: int, *, hidden: bool, weight: bool, bias: bool
    ) -> None:
        self._weight = head.weight_VH
        self._wide = accumulated(self._weight.dtype)
        self._wants_bias = bias
        self._wants_weight = weight
        self._operand_NH = hidden_NH
        self._collected_rows = min(hidden_NH.shape[0], _CHUNKS_PER_PRODUCT * chunk_rows)
        self._collected: Tensor | None = None
        self._start = self._stop = 0  # rows whose dlogits are collected but not multiplied yet
        self.hidden_NH = torch.empty_like(hidden_NH) if hidden else None
        self.weight_VH: Tensor | None = None
        self.bias_V: Tensor | None = None

    def out_for(self, logits_RV: Tensor) -> Tensor:
        """Return the output for the next chunk's dlogits: its logits, or the buffer after the last chunk's."""
        dtype, rows = self._weight.dtype, logits_RV.shape[0]
        if logits_RV.dtype == dtype:
            return logits_RV
        if self._collected is None:
            self._collected = empty_rows(self._collected_rows, logits_RV.shape[1], dtype, logits_RV.device)
        collected = self._stop - self._start
        if collected + rows > self._collected_rows:
            self._multiply_collected()
            collected = 0
        return self._collected[collected : collected + rows]

    def add(self, dlogits_RV: Tensor, start: int) -> None:
        """Add a chunk; chunks come in row order.

        Args:
            dlogits_RV: [R,V] gradient of the raw logits, in the tensor from `out_for`.
            start: its first row.
        """
        stop = start + dlogits_RV.shape[0]
        if self._wants_bias:
            bias = dlogits_RV.sum(0, dtype=self._wide)
            self.bias_V = bias if self.bias_V is None else self.bias_V.add_(bias)
        if self._collected is None:
            self._multiply(dlogits_RV, start, stop)
            return
        assert start == self._stop, "a chunk follows the last one"
        self._stop = stop

    def _multiply_collected(self) -> None:
        if self._collected is not None:
            self._multiply(self._collected[: self._stop - self._start], self._start, self._stop)
            self._start = self._stop

    def _multiply(self, dlogits_RV: Tensor, start: int, stop: int) -> None:
        if self.hidden_NH is not None:
            torch.mm(dlogits_RV, self._weight, out=self.hidden_NH[start:stop])
        if self._wants_weight:
            self._add_weight(dlogits_RV.T, self._operand_NH[start:stop])

    def _add_weight(self, dlogits_VR: Tensor, operand_RH: Tensor) -> None:
        total, first = self.weight_VH, self.weight_VH is None
        if total is None:
            total = self.weight_VH = torch.empty_like(self._weight, dtype=self._wide)
        if self._weight.dtype == self._wide:
            torch.mm(dlogits_VR, operand_RH, out=total) if first else total.addmm_(dlogits_VR, operand_RH)
        elif adds_into_fp32(total.device):
            if first:
                torch.mm(dlogits_VR, operand_RH, out_dtype=self._wide, out=total)
            else:
                torch.addmm(total, dlogits_VR, operand_RH, out_dtype=self._wide, out=total)
        else:
            kind = total.device.type, self._weight.dtype
            options: dict[str, Any] = {"out_dtype": self._wide} if multiplies_into_fp32(*kind) else {}
            for a, b in even_chunks(total.shape[0], max(1, _PRODUCT_ENTRIES // max(1, total.shape[1]))):
                product = torch.mm(dlogits_VR[a:b], operand_RH, **options)
                total[a:b].copy_(product) if first else total[a:b].add_(product)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dX [N,H], dW [V,H], db [V]: None if not requested, zero without rows."""
        self._multiply_collected()
        weight, bias = self.weight_VH, self.bias_V
        if self._wants_weight and weight is None:
            weight = torch.zeros_like(self._weight, dtype=self._wide)
        if self._wants_bias and bias is None:
            bias = self._weight.new_zeros(self._weight.shape[0], dtype=self._wide)
        return self.hidden_NH, weight, bias
