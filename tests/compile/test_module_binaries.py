"""The fused modules' kernels, compiled for every chip at a model's sizes: no spills, and loads of 16 bytes."""

import pytest
import torch
from hwgrpo_kernels import module_triton

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver

HIDDEN = [896, 8192]


def rms_norm(hidden, dtype):
    x = torch.empty(2**9, hidden, dtype=dtype, requires_grad=True)
    weight = torch.empty(hidden, requires_grad=True)
    module_triton.rms_norm(x, weight, 1e-6).sum().backward()


def swiglu(hidden, dtype):
    gate, up = (torch.empty(2**6, 2 * hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    module_triton.swiglu(gate, up).sum().backward()


def rotary(hidden, dtype):
    x = torch.empty(1, 2**6, hidden // 128, 128, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin = (torch.empty(1, 2**6, 128) for _ in range(2))
    module_triton.rotate_halves(x, cos, sin).sum().backward()


@pytest.mark.parametrize("module", [rms_norm, swiglu, rotary])
@pytest.mark.parametrize("chip", CHIPS)
def test_they_spill_nothing_and_load_16_bytes_at_a_time(chip, module):
    for hidden in HIDDEN:
        launched = StubDriver(chip).launches_of(lambda hidden=hidden: module(hidden, torch.bfloat16))
        for binary in map(Binary, launched):
            assert binary.figures["spilled"] == 0, (hidden, binary.figures)
            assert 128 in binary.accesses("load", binary.assembly), (hidden, binary.figures)
        assert len(launched) == 2
