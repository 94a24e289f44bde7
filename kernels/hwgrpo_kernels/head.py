"""The LM head as chunks of rows: GEMMs that make logits, and GEMMs that turn their gradient into dX, dW and db."""

from copy import copy

import torch
from torch import Tensor


def multiplies_into_fp32(device_type: str) -> bool:
    """Whether `torch.mm(bf16, bf16, out_dtype=fp32)` exists and is fast: CUDA only (CPU lacks it, ROCm emulates it)."""
    return device_type == "cuda" and torch.version.hip is None


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
        mixed = logits_dtype != compute_dtype
        self.out_dtype = logits_dtype if mixed and multiplies_into_fp32(weight.device.type) else None
        if mixed and self.out_dtype is None:
            weight = weight.to(logits_dtype)  # the same product: 16-bit values are exact in fp32
        self.weight_VH = weight
        self.bias_V = None if bias_V is None else bias_V.detach().to(logits_dtype)
        self.logits_dtype = logits_dtype
        self._buffer: Tensor | None = None

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
        """Return raw logits [R,V] in a buffer that the next call overwrites.

        Args:
            hidden_RH: [R,H] from `operand`.
        """
        rows = hidden_RH.shape[0]
        if self.out_dtype is not None:
            logits = torch.mm(hidden_RH, self.weight_VH.T, out_dtype=self.out_dtype)
            return logits if self.bias_V is None else logits.add_(self.bias_V)
        if self._buffer is None or self._buffer.shape[0] < rows:
            self._buffer = hidden_RH.new_empty(rows, self.vocab)
        buffer = self._buffer[:rows]
        if self.bias_V is None:
            return torch.mm(hidden_RH, self.weight_VH.T, out=buffer)
        return torch.addmm(self.bias_V, hidden_RH, self.weight_VH.T, out=buffer)


class HeadGradients:
    """Gradients of hidden states, weight and bias, collected chunk by chunk; dW and db accumulate in fp32 at least.

    Args:
        head: the head that made the logits.
        rows: N.
        hidden, weight, bias: which gradients are wanted.
    """

    def __init__(self, head: Head, rows: int, *, hidden: bool, weight: bool, bias: bool) -> None:
        self._weight = head.weight_VH
        self._wide = torch.promote_types(self._weight.dtype, torch.float32)
        self._wants_bias = bias
        self._wants_weight = weight
        self._out_dtype = self._wide if multiplies_into_fp32(self._weight.device.type) else None
        self.hidden_NH = self._weight.new_empty(rows, self._weight.shape[1]) if hidden else None
        self.weight_VH: Tensor | None = None
        self.bias_V: Tensor | None = None

    def add(self, dlogits_RV: Tensor, hidden_RH: Tensor, start: int) -> None:
        """Add the chunk that begins at row `start`.

        Args:
            dlogits_RV: [R,V] gradient of the raw logits.
            hidden_RH: [R,H] the hidden states that made them.
        """
        if self._wants_bias:
            bias = dlogits_RV.sum(0, dtype=self._wide)
            self.bias_V = bias if self.bias_V is None else self.bias_V.add_(bias)
        if self.hidden_NH is None and not self._wants_weight:
            return
        dlogits = dlogits_RV.to(self._weight.dtype)
        if self.hidden_NH is not None:
            torch.mm(dlogits, self._weight, out=self.hidden_NH[start : start + dlogits.shape[0]])
        if self._wants_weight:
            self._add_weight(dlogits.T, hidden_RH)

    def _add_weight(self, dlogits_VR: Tensor, hidden_RH: Tensor) -> None:
        narrow = self._weight.dtype != self._wide
        if not narrow and self.weight_VH is not None:
            self.weight_VH.addmm_(dlogits_VR, hidden_RH)
            return
        if narrow and self._out_dtype is not None:
            product = torch.mm(dlogits_VR, hidden_RH, out_dtype=self._out_dtype)
        else:
            product = torch.mm(dlogits_VR, hidden_RH)
        self.weight_VH = product.to(self._wide) if self.weight_VH is None else self.weight_VH.add_(product)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dX [N,H], dW [V,H], db [V]; what was not wanted is None, and what no row reached is zero."""
        weight, bias = self.weight_VH, self.bias_V
        if self._wants_weight and weight is None:
            weight = torch.zeros_like(self._weight, dtype=self._wide)
        if self._wants_bias and bias is None:
            bias = self._weight.new_zeros(self._weight.shape[0], dtype=self._wide)
        return self.hidden_NH, weight, bias
