"""Decode attention, compiled for every chip: no spills, few registers, keys and values read 16 bytes at a time."""

import re
from itertools import product

import pytest
import triton

from tests.compile.compile_cases import golden
from tests.compile.decode_compile_cases import DTYPES, NAMES, binary_of
from tests.compile.triton_stub import CHIPS

REGISTERS = {"nvidia": 128, "amd": 224, "gfx1100": 256}
"""Most registers of a thread; gfx1100 spreads a tile over half as many threads."""
KNOWN_SPILLS = {("gfx1100", "fp32", "Gemma"): 1100}
"""Bytes per thread, where no matrix unit takes fp32 and heads are largest."""
MATRIX = re.compile(r"\bmma\.sync|\bv_mfma_|\bv_wmma_")
FP32_IN_MATRIX_UNITS = ("gfx90a", "gfx942", "gfx950")


QUICK = ("sm_90", "gfx942")
"""Chips for which all is compiled in every run; for the others one launch is."""
CASES = [
    pytest.param(*each, marks=[] if each[0] in QUICK or each[1:] == ("bf16", "0.5B") else pytest.mark.slow)
    for each in product(CHIPS, DTYPES, NAMES)
]


@pytest.mark.parametrize(("chip", "dtype", "name"), CASES)
def test_it_spills_nothing_reads_wide_and_multiplies_in_matrix_units(chip, dtype, name):
    binary = binary_of(chip, dtype, name)
    family = "gfx1100" if chip == "gfx1100" else "nvidia" if binary.nvidia else "amd"
    assert binary.figures["spilled"] <= KNOWN_SPILLS.get((chip, dtype, name), 0)
    assert binary.figures["registers"] <= REGISTERS[family]
    assert binary.shared <= CHIPS[chip].shared
    assert binary.atomics() == []
    if binary.nvidia:  # copies to shared memory, of the loops
        widths = re.findall(r"cp\.async\.\w+\.shared\.global[\w.:]* \[[^]]+\], \[[^]]+\], (0x\w+|\d+)", binary.assembly)
        assert {int(width, 0) for width in widths} == {16}
    elif (chip, dtype, name) not in KNOWN_SPILLS:
        assert set(binary.in_loops("load")) == {128}
    in_units = MATRIX.search(binary.assembly) is not None
    assert in_units == (dtype == "bf16" or chip in FP32_IN_MATRIX_UNITS)
    known = golden()
    if triton.__version__ == known["triton"]:
        assert binary.figures["registers"] <= 1.25 * known["decoding"][chip][dtype][name]["registers"]
