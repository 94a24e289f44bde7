"""The row ops compile for every chip, to binaries without the faults that make a memory-bound kernel slow or wrong."""

import itertools
import warnings
from typing import NamedTuple

import pytest
import triton

from tests.compile.compile_cases import (
    ALIGNED,
    ALL_AT_ONCE,
    DTYPES,
    ODD,
    OPS,
    PLAIN,
    Case,
    binaries_of,
    cases_of,
    golden,
    is_quick,
    settings_of,
    triton_ops,
)
from tests.compile.compile_table import TABLE, table_of
from tests.compile.triton_stub import CHIPS

BITS = 128  # of the widest access of one thread


class Numbers(NamedTuple):
    read: int
    written: int


# Targets, logits at the target, temperatures, and the vectors of the ops' definitions.
NUMBERS_OF_A_ROW = {
    "row_stats": Numbers(3, 4),
    "row_grad": Numbers(8, 0),
    "row_stats_kl": Numbers(4, 9),
    "row_grad_kl": Numbers(14, 0),
}

_ALL_FP64 = ALL_AT_ONCE._replace(dtype="fp64")
_NARROW = Case("fp32", vocab=ODD, softcap=True, padded=True, persistent=True, narrow_out=True)

# Bytes per thread, no more than these. Each such kernel keeps to a number of registers that the compiler chose, but for
# the rows of sm_100 with a reference, which are in no buffer of the driver: it pads them.
KNOWN_SPILLS = {
    ("sm_90", ALL_AT_ONCE, "row_grad"): 8,
    ("sm_90", _ALL_FP64, "row_stats"): 8,
    ("sm_100", _NARROW, "row_stats"): 8,
    ("sm_100", _NARROW, "row_grad"): 8,
    ("sm_100", Case(vocab=ODD, softcap=True, reference=True), "row_stats"): 336,
    ("sm_120", Case(vocab=ODD, padded=True, reference=True), "row_grad"): 16,
    ("sm_120", _NARROW, "row_stats"): 8,
    ("sm_120", _ALL_FP64, "row_stats"): 8,
}


CASES = [
    pytest.param(chip, case, op, id=f"{chip}-{case}-{op}", marks=[] if is_quick(chip, case) else [pytest.mark.slow])
    for chip in CHIPS
    for case in cases_of(chip)
    for op in OPS
]
each_case = pytest.mark.parametrize("chip,case,op", CASES)


def test_every_op_with_a_triton_implementation_is_compiled_here():
    compiled = {case.op(kernel) for case in (PLAIN, PLAIN._replace(reference=True)) for kernel in OPS}
    elsewhere = {"dequantize_nf4", "block_sums", "kept_sums", "pick", "decode_attention", "swiglu"}  # in other files
    assert set(triton_ops()) == compiled | elsewhere
    assert set(binaries_of("sm_90", PLAIN)) == set(OPS)


@pytest.mark.parametrize("chip", CHIPS)
def test_any_two_settings_meet_on_every_chip_in_each_combination(chip):
    def pairs(settings):
        return set(itertools.combinations(sorted(settings.items()), 2))

    values = {name: {True, False} for name in ("softcap", "row_scale", "persistent", "narrow_out")}
    values["dtype"] = set(DTYPES)
    values["rows"] = {(True, False), (False, False), (False, True)}
    values["beside the logarithms"] = {(True, False), (False, False), (True, True)}
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    possible = [settings for settings in every if settings["dtype"] == "fp32" or not settings["narrow_out"]]
    lacking = set().union(*map(pairs, possible)) - set().union(*(pairs(settings_of(case)) for case in cases_of(chip)))
    assert not lacking


@each_case
def test_no_register_lives_in_memory_and_shared_memory_suffices(chip, case, op):
    binary = binaries_of(chip, case)[op]
    assert binary.figures["spilled"] <= KNOWN_SPILLS.get((chip, case, op), 0)
    assert binary.shared <= CHIPS[chip].shared
    assert binary.threads <= 1024


@each_case
def test_nothing_is_atomic(chip, case, op):
    assert binaries_of(chip, case)[op].atomics() == []


@each_case
def test_logits_are_accessed_16_bytes_at_a_time_where_rows_are_aligned(chip, case, op):
    binary = binaries_of(chip, case)[op]
    loads, stores = binary.in_loops("load"), binary.in_loops("store")
    assert loads, "the loop over whole blocks is not found"
    if op == "row_grad":
        read_per_bit = (1 + case.reference) * (2 if case.narrow_out else 1)
        assert sum(stores) * read_per_bit == sum(loads), "the logits that the loops read, they write"
    if case.padded:
        wide = [loop for loop in binary.loops if set(binary.accesses("load", loop)) == {BITS}]
        assert len(wide) == 1, "all but the tail of a row is read 16 bytes at a time"
        # a persistent program reads 16 bytes of fp32 logits and writes the 8 bytes of their bf16 gradients
        stored = BITS // 2 if case.narrow_out and case.persistent else BITS
        assert set(binary.accesses("store", wide[0])) <= {stored}
    if case.vocab == ALIGNED:
        assert set(loads) == {BITS}
        assert set(stores) <= {BITS}
        # Outside of loops: numbers of the row, and blocks that were unrolled.
        assert (
            sum(bits < BITS for bits in binary.accesses("load", binary.assembly)) <= NUMBERS_OF_A_ROW[case.op(op)].read
        )
        assert (
            sum(bits < BITS for bits in binary.accesses("store", binary.assembly))
            <= NUMBERS_OF_A_ROW[case.op(op)].written
        )


@pytest.mark.parametrize("op", OPS)
def test_the_next_block_is_read_while_one_is_computed_where_registers_suffice(op):
    assert binaries_of("gfx942", PLAIN)[op].share_in_flight() > 0.5
    assert binaries_of("gfx942", Case(softcap=True))[op].share_in_flight() < 0.3, "a plain loop waits for what it reads"


@each_case
def test_where_a_floor_is_kept_nan_passes_it(chip, case, op):
    binary = binaries_of(chip, case)[op]
    logits_in_loops = sum(binary.in_loops("load")) // (8 * DTYPES[case.dtype].itemsize)
    if case.reference:
        floors = logits_in_loops // 2  # those of the policy
    elif case.entropy:
        floors = logits_in_loops
    else:
        floors = 1 if op == "row_stats" else 0
    assert binary.nan_maxima() >= floors


@each_case
def test_figures_are_near_those_written_down(chip, case, op):
    known = golden()
    figures, expected = binaries_of(chip, case)[op].figures, known["figures"][chip][str(case)][op]
    changes = [
        f"{name}: {expected.get(name)} -> {figures.get(name)}"
        for name in sorted({*figures, *expected})
        if figures.get(name) != expected.get(name)
    ]
    if changes:
        where = f"{op} on {chip}, {case}, since golden.json of Triton {known['triton']}"
        warnings.warn("; ".join([where, *changes]), stacklevel=1)
    if triton.__version__ == known["triton"]:
        assert figures["registers"] <= 1.25 * expected["registers"], changes


def test_the_table_for_people_is_that_of_the_figures():
    assert TABLE.read_text(encoding="utf-8") == table_of(golden()), "run tests/compile/write_golden.py"
