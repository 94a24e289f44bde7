"""The LM head as chunks of rows: GEMMs that make logits, and GEMMs that turn their gradient into dX, dW and db."""

from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .chunks import even_chunks
from .matrices import accumulated

_ACCESS_BYTES = 16  # the widest access of one thread on every GPU
_TILE_BYTES = 64  # a row of an AMX tile
_CHUNKS_PER_PRODUCT = 2  # of fp32 logits: their gradients in 16 bits fill as much memory as the logits of one
_PRODUCT_ENTRIES = 2**26  # of dW at once, where it cannot be added to as it is made


def keeps_16_bit_operands(compute_dtype: torch.dtype, logits_dtype: torch.dtype, device_type: str) -> bool:
    """Whether the head makes logits of a wider dtype than its GEMMs' operands."""
    return logits_dtype != compute_dtype and multiplies_into_fp32(device_type)


def logits_buffers(compute_dtype: torch.dtype, logits_dtype: torch.dtype, device_type: str) -> int:
    """Return how many chunks of logits fit where those of one chunk and the gradients not multiplied yet are kept."""
    return 2 if keeps_16_bit_operands(compute_dtype, logits_dtype, device_type) else 1


@cache
def adds_into_fp32(device: torch.device) -> bool:
    """Whether `torch.addmm` adds a product of 16-bit operands to fp32 on this device, as newer ones for CUDA do."""
    if not multiplies_into_fp32(device.type):
        return False
    total, operand = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it wants the sum in the dtype of the operands
        return False
    return True


def multiplies_into_fp32(device_type: str) -> bool:
    """Whether `torch.mm(bf16, bf16, out_dtype=fp32)` exists and is fast: CUDA only (CPU lacks it, ROCm emulates it)."""
    return device_type == "cuda" and torch.version.hip is None


def row_stride(columns: int, dtype: torch.dtype, device_type: str) -> int:
    """Return how many elements apart rows of C columns begin in a buffer of `empty_rows`: 16 bytes divide it.

    Row kernels then read 16 bytes at a time and GEMMs keep their fast paths whatever V is; BLAS writes such rows where
    they lie, by its leading dimension. That Ascend's GEMMs do is not known, so there rows follow each other.

    On a CPU it is 64 bytes: oneDNN's bf16 products on AMX (3.12, in torch 2.13) read a row to the end of its last tile
    and multiply what lies beyond the row by zero, so that a NaN of the next row would come into this one's result.
    """
    bytes_ = {"npu": dtype.itemsize, "cpu": _TILE_BYTES}.get(device_type, _ACCESS_BYTES)
    per_access = max(1, bytes_ // dtype.itemsize)
    return -(-columns // per_access) * per_access


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer [R,C] with `row_stride` from row to row; what lies between the rows is zero and never written.

    Zero, since a product may read it; see `row_stride`.
    """
    buffer = torch.empty(rows, row_stride(columns, dtype, device.type), dtype=dtype, device=device)
    buffer[:, columns:].zero_()
    return buffer[:, :columns]


class Head:
    """The head's weight and bias, cast once for all chunks of a call.

    Args:
        weight_VH: [V,H].
        bias_V: [V] or None.
        compute_dtype: dtype of the GEMM operands.
        logits_dtype: dtype of the logits; fp32 with 16-bit operands keeps the product's fp32 accumulator.
    """

    def __init__(
        self, weight_VH: Tensor, bias_V: Tensor | None, compute_dtype: torch.dtype, logits_dtype: torch.dtype
    ) -> None:
        weight = weight_VH.detach().to(compute_dtype)
        device_type = weight.device.type
        self.out_dtype = logits_dtype if keeps_16_bit_operands(compute_dtype, logits_dtype, device_type) else None
        if logits_dtype != compute_dtype and self.out_dtype is None:
            weight = weight.to(logits_dtype)  # the same product: 16-bit values are exact in fp32
        self.weight_VH = weight
        self.bias_V = None if bias_V is None else bias_V.detach().to(logits_dtype)
        self.logits_dtype = logits_dtype
        self._buffer: Tensor | None = None
        self._expected = 0

    def expect(self, rows: int) -> None:
        """Make room for chunks of up to this many rows at the first, so that a longer one needs no other buffer."""
        self._expected = rows

    @property
    def vocab(self) -> int:
        """V."""
        return self.weight_VH.shape[0]

    def with_own_buffer(self) -> "Head":
        """Return the same head with room for other logits."""
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
            self._buffer = None  # its memory is there for the next
            self._buffer = empty_rows(max(rows, self._expected), self.vocab, self.logits_dtype, hidden_RH.device)
        buffer = self._buffer[:rows]
        if self.out_dtype is not None:
            torch.mm(hidden_RH, self.weight_VH.T, out_dtype=self.out_dtype, out=buffer)
            return buffer if self.bias_V is None else buffer.add_(self.bias_V)
        if self.bias_V is None:
            return torch.mm(hidden_RH, self.weight_VH.T, out=buffer)
        return torch.addmm(self.bias_V, hidden_RH, self.weight_VH.T, out=buffer)


class HeadGradients:
    """Gradients of hidden states, weight and bias, collected chunk by chunk; dW and db accumulate in fp32 at least.

    Where GEMMs cannot return fp32 (all but CUDA), a chunk's dW is rounded to 16 bits before it is added.

    Args:
        head: the head that made the logits.
        hidden_NH: from `Head.operand`.
        chunk_rows: the most rows of a chunk.
        hidden, weight, bias: which gradients are wanted.
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
        self._start = self._stop = 0  # rows whose dlogits are collected, and not multiplied yet
        self.hidden_NH = torch.empty_like(hidden_NH) if hidden else None
        self.weight_VH: Tensor | None = None
        self.bias_V: Tensor | None = None

    def out_for(self, logits_RV: Tensor) -> Tensor:
        """Return where the gradient of the next chunk's raw logits belongs: onto these, or beside the last chunk's."""
        dtype, rows = self._weight.dtype, logits_RV.shape[0]
        if logits_RV.dtype == dtype:
            return logits_RV
        if self._collected is None:
            self._collected = empty_rows(self._collected_rows, logits_RV.shape[1], dtype, logits_RV.device)
        held = self._stop - self._start
        if held + rows > self._collected_rows:
            self._multiply_collected()
            held = 0
        return self._collected[held : held + rows]

    def add(self, dlogits_RV: Tensor, start: int) -> None:
        """Add a chunk, which follows the last one.

        Args:
            dlogits_RV: [R,V] gradient of the raw logits, in what `out_for` returned.
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
            options: dict[str, Any] = {"out_dtype": self._wide} if multiplies_into_fp32(total.device.type) else {}
            for a, b in even_chunks(total.shape[0], max(1, _PRODUCT_ENTRIES // max(1, total.shape[1]))):
                product = torch.mm(dlogits_VR[a:b], operand_RH, **options)
                total[a:b].copy_(product) if first else total[a:b].add_(product)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dX [N,H], dW [V,H], db [V]; what was not wanted is None, and what no row reached is zero."""
        self._multiply_collected()
        weight, bias = self.weight_VH, self.bias_V
        if self._wants_weight and weight is None:
            weight = torch.zeros_like(self._weight, dtype=self._wide)
        if self._wants_bias and bias is None:
            bias = self._weight.new_zeros(self._weight.shape[0], dtype=self._wide)
        return self.hidden_NH, weight, bias
