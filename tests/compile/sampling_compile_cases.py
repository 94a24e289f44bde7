"""Launches of the sampling kernels that are compiled, and the figures of their binaries."""

from collections.abc import Callable
from typing import Any

import torch
from hwgrpo_kernels import sampling_triton

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver

VOCAB, ROWS = 151936, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = ("block_sums", "pick", "pick greedy", "kept_sums", "kept_sums min_p")


def calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return the launches of a step by name; at a temperature, since dividing needs registers, too."""
    logits = torch.empty(ROWS, VOCAB, dtype=dtype)
    block_max = block_sum = torch.empty(ROWS, -(-VOCAB // 256))
    row = torch.empty(ROWS)
    sums = (logits, block_max, block_sum)
    return {
        "block_sums": lambda: sampling_triton.block_sums(logits, 0.7),
        "pick": lambda: sampling_triton.pick(*sums, row, row, 0.7),
        "pick greedy": lambda: sampling_triton.pick(*sums, None, None, 1.0),
        "kept_sums": lambda: sampling_triton.kept_sums(*sums, 50, 0.9, 0.05, 0.7),
        "kept_sums min_p": lambda: sampling_triton.kept_sums(*sums, 0, 1.0, 0.05, 1.0),
    }


def binary_of(chip: str, dtype: str, name: str) -> Binary:
    """Return the binary of a launch."""
    [launched] = StubDriver(chip).launches_of(calls(DTYPES[dtype])[name])
    return Binary(launched)


def sampling_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Return chip -> dtype -> launch -> figures."""
    return {
        chip: {dtype: {name: binary_of(chip, dtype, name).figures for name in NAMES} for dtype in DTYPES}
        for chip in CHIPS
    }
