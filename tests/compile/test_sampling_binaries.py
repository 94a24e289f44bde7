"""The sampling kernels, compiled for every chip: no spills, few registers, logits read 16 bytes at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hwgrpo_kernels import sampling_triton

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver

VOCAB, ROWS = 151936, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REGISTERS = {"block_sums": 96, "pick": 96, "pick greedy": 64, "kept_sums": 192, "kept_sums min_p": 64}
"""Kernel -> most registers of a thread."""
KNOWN_SPILLS = {("sm_90", "fp32"): 8, ("sm_100", "bf16"): 8, ("sm_120", "fp32"): 56}
"""Bytes per thread of `kept_sums` with all filters: the compiler keeps to 128 registers there."""


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


@pytest.mark.parametrize("name", REGISTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_it_spills_nothing_and_reads_logits_wide(chip, dtype, name):
    [launched] = StubDriver(chip).launches_of(calls(DTYPES[dtype])[name])
    binary = Binary(launched)
    assert binary.figures["spilled"] <= (KNOWN_SPILLS.get((chip, dtype), 0) if name == "kept_sums" else 0)
    assert binary.figures["registers"] <= REGISTERS[name]
    assert binary.shared <= CHIPS[chip].shared
    assert binary.atomics() == []
    if name == "block_sums":
        assert set(binary.accesses("load", binary.assembly)) == {128}
