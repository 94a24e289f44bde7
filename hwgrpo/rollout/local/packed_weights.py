"""Products of a decode step by oneDNN, for a CPU: frozen weights are kept in the layout that its kernels read.

A decode step multiplies few rows by all weights. torch's `linear` brings each weight into the layout of the product at
every call: in 16 bits by oneDNN; in fp32 by MKL, which on an AMD EPYC takes 2.6 times as long as oneDNN with packed
weights (benchmarks/results/real_model.md).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(hidden states [B, inputs], bias [outputs] or None) -> [B, outputs]."""

LEAST_ELEMENTS = 2**16
"""Elements from which on a weight is packed: oneDNN's calls cost about 10 us each, which small products do not gain."""

MOST_BYTES = 2 * 2**30
"""Largest sum of packed weights in bytes; they are kept beside the model's own."""

COMPARED = 256
"""Elements of a weight by which a change is noticed that torch did not count."""

CPUINFO = Path("/proc/cpuinfo")
"""Linux' list of processor features."""


class PackedWeights:
    """Packed copies of frozen weights. `packed_weights` makes one where it is of use."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], _PackedWeight] = {}
        self._avoids_mkl = not _is_intel()

    def product(self, parts: Sequence[torch.Tensor], weight: torch.Tensor) -> Product | None:
        """Return the product with a weight as it is now, or None where torch's own is as fast.

        Trained weights are not packed: their copies would be stale after every update.

        Args:
            parts: the parameters that are the weight's rows, one after another.
            weight: [outputs, inputs].
        """
        if weight.numel() < LEAST_ELEMENTS:
            return None
        key = tuple(map(id, parts))
        if any(part.requires_grad or part.is_inference() for part in parts):
            self._packed.pop(key, None)
        elif self._has_room(key, weight):
            packed = self._packed.setdefault(key, _PackedWeight(tuple(parts)))
            packed.pack(weight)
            return packed
        return _unpacked(weight) if weight.dtype == torch.float32 and self._avoids_mkl else None

    def _has_room(self, key: tuple[int, ...], weight: torch.Tensor) -> bool:
        held = sum(each.weight.nbytes for each in self._packed.values())
        return key in self._packed or held + weight.nbytes <= MOST_BYTES

    def refresh(self) -> None:
        """Pack those weights again that were updated in place."""
        for each in [*self._packed.values()]:
            each.pack(each.weight)


class _PackedWeight:
    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        self._parts = parts  # alive, so that no other tensor gets their ids
        self._state: list[int] = []
        self.weight = self._packed = self._values = torch.empty(0)

    def pack(self, weight: torch.Tensor) -> None:
        state = [weight.data_ptr(), *(part._version for part in self._parts)]
        weight = weight.detach()
        # torch counts no updates of `.data`, by which peft merges adapters into their base
        values = weight.reshape(-1)[:: -(-weight.numel() // COMPARED)]
        if state != self._state or not torch.equal(values, self._values):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self.weight, self._state, self._values = weight, state, values.clone()

    def __call__(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear(hidden, self._packed, bias)


def _unpacked(weight: torch.Tensor) -> Product:
    return lambda hidden, bias: _linear(hidden, weight, bias)


def _linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")


def packed_weights(device_type: str, dtype: torch.dtype) -> PackedWeights | None:
    """Return packed weights for a device and dtype; None: torch multiplies, as on all but x86 processors."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    if device_type != "cpu" or not is_x86 or not torch.backends.mkldnn.is_available():
        return None
    mkldnn = torch.ops.mkldnn
    supported = {
        torch.float32: lambda: True,
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
    }
    return PackedWeights() if dtype in supported and supported[dtype]() else None


def _is_intel() -> bool:
    return CPUINFO.exists() and "GenuineIntel" in CPUINFO.read_text()
