"""Ranges for the vendors' own profilers, which do not see torch's `record_function`.

Cheap where no profiler listens: two calls into a library that then returns at once. Never run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nvtx(name: str) -> Iterator[None]:
    """Name a range for Nsight (NVTX) or, in ROCm builds of torch, for rocprof (roctx)."""
    if not hasattr(torch._C, "_nvtx"):  # torch was built without either
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def mstx(name: str) -> Iterator[None]:
    """Name a range for msprof (MSTX), where torch-npu has that."""
    marks = getattr(torch.get_device_module("npu"), "mstx", None)
    if marks is None:
        yield
        return
    number = marks.range_start(name)
    try:
        yield
    finally:
        marks.range_end(number)
