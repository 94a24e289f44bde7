"""The LM head's weight in the dtype of its products, cast once for all passes of an update."""

from __future__ import annotations

import torch
from hwgrpo_kernels import weight_operand


class HeadOperand:
    """Holds the cast weight from the first pass after an update to the end of the next update's last pass.

    A weight that has that dtype already is returned itself and costs no memory. Whoever writes into the weight calls
    `release`: torch's fused optimizers do not count their writes as a new version of it (2.13).
    """

    def __init__(self) -> None:
        self._operand: torch.Tensor | None = None
        self._source: tuple[object, ...] = ()

    def of(self, weight: torch.Tensor, compute_dtype: torch.dtype, logits_dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` [V, H] as the head's products read it, cast again after `release` and for another weight.

        Args:
            weight: the head's weight.
            compute_dtype: dtype of the products.
            logits_dtype: dtype of the logits.
        """
        source = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, compute_dtype, logits_dtype)
        if self._operand is None or self._source != source:
            self._operand = None  # frees its memory for the next
            self._operand, self._source = weight_operand(weight, compute_dtype, logits_dtype), source
        return self._operand

    def release(self) -> None:
        """Free the cast weight, which the next pass casts anew."""
        self._operand = None
