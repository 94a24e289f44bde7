"""The kernel that dequantizes NF4, compiled for every chip: no spills, few registers, stores of 16 bytes."""

import pytest
import torch
from hwgrpo_kernels import nf4_triton

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chip", CHIPS)
def test_it_spills_nothing_and_stores_16_bytes_at_a_time(chip, dtype):
    def call():
        nf4_triton._table.cache_clear()
        packed, scales = torch.empty(2**20, dtype=torch.uint8), torch.empty(2**15)
        nf4_triton.dequantize_nf4(packed, scales, torch.empty(2**10, 2**11, dtype=dtype))

    [launched] = StubDriver(chip).launches_of(call)
    binary = Binary(launched)
    assert binary.figures["spilled"] == 0
    assert binary.figures["registers"] <= 64
    assert set(binary.accesses("store", binary.assembly)) == {128}
