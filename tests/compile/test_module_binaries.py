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


def rms_norm_for_linears(hidden, dtype):
    """In the compute dtype from an fp32 residual stream, read by queries, keys and values with adapters."""
    x, weight = torch.empty(2**9, hidden, requires_grad=True), torch.empty(hidden, requires_grad=True)
    copies = module_triton.rms_norm_copies(x, weight, 1e-6, dtype, module_triton.MOST_COPIES)
    torch.autograd.backward(copies, [torch.empty_like(each) for each in copies])


def add_rms_norm(hidden, dtype):
    """An update in 16 bits, and a norm that gate and up read."""
    x, weight = torch.empty(2**9, hidden, requires_grad=True), torch.empty(hidden, requires_grad=True)
    update = torch.empty(2**9, hidden, dtype=dtype, requires_grad=True)
    outputs = module_triton.add_rms_norm(x, update, weight, 1e-6, dtype, 2)
    torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])


def swiglu(hidden, dtype):
    gate, up = (torch.empty(2**6, 2 * hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    module_triton.swiglu(gate, up).sum().backward()


def rotary(hidden, dtype):
    x = torch.empty(1, 2**6, hidden // 128, 128, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin = (torch.empty(1, 2**6, 128) for _ in range(2))
    module_triton.rotate_halves(x, cos, sin).sum().backward()


@pytest.mark.parametrize("module", [rms_norm, rms_norm_for_linears, add_rms_norm, swiglu, rotary])
@pytest.mark.parametrize("chip", CHIPS)
def test_they_spill_nothing_and_load_16_bytes_at_a_time(chip, module):
    for hidden in HIDDEN:
        launched = StubDriver(chip).launches_of(lambda hidden=hidden: module(hidden, torch.bfloat16))
        for binary in map(Binary, launched):
            assert binary.figures["spilled"] == 0, (hidden, binary.figures)
            assert 128 in binary.accesses("load", binary.assembly), (hidden, binary.figures)
        assert len(launched) == 2
