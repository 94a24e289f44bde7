"""The fused modules' kernels, compiled for every chip at a model's sizes: no spills, and loads of 16 bytes."""

import pytest
import triton

from tests.compile.compile_cases import FIRST_CHIPS, golden
from tests.compile.module_compile_cases import NAMES, module_binaries
from tests.compile.triton_stub import CHIPS

REGISTERS = {"rms_norm": 256, "rms_norm_for_linears": 256, "add_rms_norm": 256, "swiglu": 96, "rotary": 64}
"""Module -> most registers of a thread: with a norm's, one program of eight warps fits a processor of NVIDIA's."""
LARGEST = "add_rms_norm 8192"
CASES = [
    pytest.param(chip, name, marks=[] if chip in FIRST_CHIPS or name == LARGEST else [pytest.mark.slow])
    for chip in CHIPS
    for name in NAMES
]


@pytest.mark.parametrize("chip,name", CASES)
def test_they_spill_nothing_and_load_16_bytes_at_a_time(chip, name):
    known = golden()
    for kind, binary in zip(("forward", "backward"), module_binaries(chip, name), strict=True):
        assert binary.figures["spilled"] == 0, (kind, binary.figures)
        assert binary.figures["registers"] <= REGISTERS[name.split()[0]]
        assert binary.shared <= CHIPS[chip].shared
        assert binary.atomics() == []
        assert 128 in binary.accesses("load", binary.assembly), (kind, binary.figures)
        if triton.__version__ == known["triton"]:
            assert binary.figures["registers"] <= 1.25 * known["modules"][chip][name][kind]["registers"]
