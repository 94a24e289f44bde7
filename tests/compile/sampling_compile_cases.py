"""Binaries of the sampling kernels for every chip, and their figures."""

from typing import Any

import torch

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver
from tests.support.numbers.kernel_calls import sampling_calls

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = ("block_sums", "pick", "pick greedy", "kept_sums", "kept_sums min_p")


def binary_of(chip: str, dtype: str, name: str) -> Binary:
    """Return the binary of a launch."""
    [launched] = StubDriver(chip).launches_of(sampling_calls(DTYPES[dtype])[name])
    return Binary(launched)


def sampling_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Return chip -> dtype -> launch -> figures."""
    return {
        chip: {dtype: {name: binary_of(chip, dtype, name).figures for name in NAMES} for dtype in DTYPES}
        for chip in CHIPS
    }
