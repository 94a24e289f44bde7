"""The sampling kernels, compiled for every chip: no spills, few registers, logits read 16 bytes at a time."""

import itertools

import pytest
import triton

from tests.compile.compile_cases import FIRST_CHIPS, golden
from tests.compile.sampling_compile_cases import DTYPES, binary_of
from tests.compile.triton_stub import CHIPS

REGISTERS = {"block_sums": 96, "pick": 96, "pick greedy": 64, "kept_sums": 192, "kept_sums min_p": 64}
"""Kernel -> most registers of a thread."""
KNOWN_SPILLS = {("sm_90", "fp32"): 8, ("sm_100", "bf16"): 8, ("sm_120", "fp32"): 56}
"""Bytes per thread of `kept_sums` with all filters: the compiler keeps to 128 registers there."""
LARGEST = ("bf16", "kept_sums")
CASES = [
    pytest.param(*case, marks=[] if case[0] in FIRST_CHIPS or case[1:] == LARGEST else [pytest.mark.slow])
    for case in itertools.product(CHIPS, DTYPES, REGISTERS)
]


@pytest.mark.parametrize("chip,dtype,name", CASES)
def test_it_spills_nothing_and_reads_logits_wide(chip, dtype, name):
    binary = binary_of(chip, dtype, name)
    assert binary.figures["spilled"] <= (KNOWN_SPILLS.get((chip, dtype), 0) if name == "kept_sums" else 0)
    assert binary.figures["registers"] <= REGISTERS[name]
    assert binary.shared <= CHIPS[chip].shared
    assert binary.atomics() == []
    if name == "block_sums":
        assert set(binary.accesses("load", binary.assembly)) == {128}
    known = golden()
    if triton.__version__ == known["triton"]:
        assert binary.figures["registers"] <= 1.25 * known["sampling"][chip][dtype][name]["registers"]
