"""Kernels lower for Ascend to vector programs; those of rows fit the unified buffer. Nothing here runs on an NPU."""

import pytest
from hwgrpo_kernels import ascend_tiles
from hwgrpo_kernels.ascend_tiles import RowKernel

from tests.lowering.ascend_ir import block_loops, peak_bytes, single_reads_kept_inside, violations
from tests.lowering.ascend_lowering import CASES, CHIP, MODULES, SAMPLING, VECTOR_CORES

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LOGITS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
KINDS = (
    "inline asm",
    "unresolved function",
    "loop over single numbers",
    "compare of integer vectors",
    "vector of 64-bit integers",
    "not for vector cores alone",
)


@EVERY_CASE
def test_a_kernel_lowers_to_nothing_but_vector_work(lowered, case):
    assert violations(lowered[case.name].linalg) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_fused_module_lowers_to_nothing_but_vector_work(lowered, name):
    assert violations(lowered[name].linalg) == []


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_kernel_stays_on_gpus_for_what_a_vector_core_lacks(lowered, name):
    assert {found.split(":")[0] for found in violations(lowered[name].linalg)} == SAMPLING[name]


def test_the_tiles_of_a_norm_s_gradient_are_too_large_for_the_unified_buffer(lowered):
    of_hidden = {}
    for name in (name for name in MODULES if "norm" in name and name.endswith("backward")):
        hidden = int(name.split("-")[0].split()[1])
        of_hidden.setdefault(hidden, set()).add(peak_bytes(lowered[name].linalg, lowered[name].block) // 1024)
    assert of_hidden == {3584: {128}, 8192: {256}}  # KiB of vectors, without copies in flight
    assert ascend_tiles.chip_of(CHIP).unified_buffer == 192 * 1024


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_violation_is_found(lowered, kind):
    assert any(found.startswith(f"{kind}: ") for found in violations(lowered[kind].linalg))


def test_an_operation_of_triton_left_in_the_text_is_found(lowered):
    text = lowered[CASES[0].name].linalg
    left = text.replace("    return\n", "    %left = tt.load %arg2 : tensor<64xf32>\n    return\n")
    assert [found.split(":")[0] for found in violations(left)] == ["Triton operation left"]


@EVERY_CASE
def test_whole_blocks_are_copied_unmasked_and_only_the_last_loop_is_masked(lowered, case):
    assert [loop.is_masked for loop in block_loops(lowered[case.name].linalg)] == [False, True]


@pytest.mark.parametrize("case", [case for case in CASES if "stats" in case.op], ids=lambda case: case.name)
def test_the_target_is_read_at_a_place_kept_inside_the_row(lowered, case):
    # A masked read of one number is lowered to a read and a mask after it.
    kept = single_reads_kept_inside(lowered[case.name].linalg, LOGITS[case.dtype])
    assert kept == [True] * (2 if case.op == "row_stats_kl" else 1)


@EVERY_CASE
def test_the_planner_counts_at_least_what_is_alive_in_the_lowered_kernel(lowered, case):
    _, _, block = lowered[case.name]
    itemsize = 4 if case.wide_out or case.dtype == "float32" else 2
    kernel = RowKernel(case.op, itemsize, case.softcap)
    alive = peak_bytes(lowered[case.name].linalg, block)
    assert 0 < alive <= kernel.live * 4 * block
    assert alive > (kernel.live - 3) * 4 * block, "the planner's count is far too high"


@EVERY_CASE
def test_a_program_per_vector_core_is_launched(lowered, case):
    assert tuple(lowered[case.name].grid) == (VECTOR_CORES, 1, 1)


@EVERY_CASE
def test_the_lowered_block_is_the_planned_one(lowered, case):
    itemsize = 4 if case.wide_out or case.dtype == "float32" else 2
    planned = ascend_tiles.tile_for(RowKernel(case.op, itemsize, case.softcap), CHIP, 20_011).block
    assert lowered[case.name].block == planned
    assert f"tensor<1x{planned}xf32>" in lowered[case.name].linalg
