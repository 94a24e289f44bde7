"""What the chip reaches at best: a large GEMM, a copy, and the GEMM of a shape itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape

from hwgrpo.bench.kernels.clock import Clock, Samples

GEMM_SIDE, HOST_GEMM_SIDE = 8192, 1024
COPY_BYTES, HOST_COPY_BYTES = 2**30, 2**26
WARM_UP, REPEAT = 2, 5


@dataclass
class Ceiling:
    """Rates per second, each the median of samples at the start and at the end of a run."""

    gemm_side: int
    gemm: Samples
    copy_bytes: int
    copy: Samples

    @property
    def flops_per_s(self) -> float | None:
        """Of the square GEMM."""
        return 2 * self.gemm_side**3 / self.gemm.median if self.gemm.median else None

    @property
    def bytes_per_s(self) -> float | None:
        """Read and written by the copy."""
        return 2 * self.copy_bytes / self.copy.median if self.copy.median else None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        halves = len(self.gemm.seconds) // 2
        ends = (self.gemm.seconds[:halves], self.gemm.seconds[halves:])
        start, end = (2 * self.gemm_side**3 / median(each) if each else None for each in ends)
        return {
            "gemm_side": self.gemm_side,
            "flops_per_s": self.flops_per_s,
            "flops_per_s_at_start": start,
            "flops_per_s_at_end": end,
            "copy_bytes": self.copy_bytes,
            "bytes_per_s": self.bytes_per_s,
        }


class CeilingMeter:
    """Measures the ceilings; call it at the start and at the end of a run.

    Args:
        device: where.
        dtype: of the GEMM's operands and result.
        clock: the clock of everything else in the run.
    """

    def __init__(self, device: Device, dtype: torch.dtype, clock: Clock) -> None:
        host = device.backend.is_host
        self._place, self._dtype, self._clock = device.torch_device, dtype, clock
        self.ceiling = Ceiling(
            HOST_GEMM_SIDE if host else GEMM_SIDE, clock.samples(), HOST_COPY_BYTES if host else COPY_BYTES,
            clock.samples(),
        )  # fmt: skip

    def __call__(self) -> None:
        """Add samples of both."""
        side = self.ceiling.gemm_side
        a, b = (torch.randn(side, side, device=self._place).to(self._dtype) for _ in range(2))
        out = torch.empty_like(a)
        self._repeat(self.ceiling.gemm, lambda: torch.mm(a, b, out=out))
        source = torch.ones(self.ceiling.copy_bytes, dtype=torch.uint8, device=self._place)
        target = torch.zeros_like(source)
        self._repeat(self.ceiling.copy, lambda: target.copy_(source))

    def shape(self, shape: Shape) -> Samples:
        """Return samples of the logits' own GEMM, [N,H] times [H,V]; rows are cut so that they take 4 GiB at most."""
        rows = gemm_rows(shape, self._dtype)
        hidden = torch.randn(rows, shape.H, device=self._place).to(self._dtype)
        weight = torch.randn(shape.V, shape.H, device=self._place).to(self._dtype)
        out = torch.empty(rows, shape.V, dtype=self._dtype, device=self._place)
        samples = self._clock.samples()
        self._repeat(samples, lambda: torch.mm(hidden, weight.T, out=out))
        return samples

    def _repeat(self, samples: Samples, work: Callable[[], object]) -> None:
        for _ in range(WARM_UP):
            work()
        for _ in range(REPEAT):
            self._clock.measure(samples, work)


def gemm_rows(shape: Shape, dtype: torch.dtype) -> int:
    """Return the rows of a shape whose logits fit into 4 GiB."""
    return min(shape.N, max(1, 2**32 // (shape.V * dtype.itemsize)))
