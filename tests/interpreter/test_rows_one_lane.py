"""The row kernels agree with the definitions in the shape they have on Ascend: one lane, and a program for many rows.

tests/lowering runs this file once more, in the interpreter of triton-ascend, which knows no fp64.
"""

import pytest
import torch
from hwgrpo_kernels.ascend_tiles import RowKernel, tile_for
from hwgrpo_kernels.op import Shape
from hwgrpo_kernels.tiles import Tile

from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import GRAD, GRAD_KL, ROW_OPS, STATS, STATS_KL, statistics, with_tile

CASES = [pytest.param(op, case, id=f"{op.name}-{case}") for op in ROW_OPS for case in op.cases]
SHORT = Tile(lanes=1, width=128, warps=0, per_processor=2)  # V = 517: four whole blocks and a tail of five
PLANNED = tile_for(RowKernel("row_grad_kl", 4, softcap=True), "Ascend910B2", 151_936)


@pytest.mark.parametrize("op,case", CASES)
def test_one_lane_equals_the_definition(op, case):
    inputs = op.inputs(Shape(3, 0, 517), torch.bfloat16, "cpu", case)
    assert_agrees(op, with_tile(op, SHORT), inputs, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_one_lane_takes_every_dtype(op, dtype):
    assert_agrees(op, with_tile(op, SHORT), op.inputs(Shape(3, 0, 517), dtype, "cpu", "softcap"), dtype)


@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_a_planned_tile_equals_the_definition(op):
    inputs = op.inputs(Shape(3, 0, 2 * PLANNED.block + 13), torch.bfloat16, "cpu", "row_scale")
    assert_agrees(op, with_tile(op, PLANNED), inputs, torch.bfloat16)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 256, 383])
@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_one_lane_finds_the_target_wherever_it_is(op, vocab):
    rows = min(vocab, 5)
    places = torch.linspace(0, vocab - 1, rows).long()  # first, last and between
    inputs = op.inputs(Shape(rows, 0, vocab), torch.float32, "cpu")
    if op in (GRAD, GRAD_KL):  # their statistics belong to the targets
        inputs |= statistics(op, inputs, places)
    assert_agrees(op, with_tile(op, SHORT), inputs | {"targets": places}, torch.float32)


@pytest.mark.parametrize("op", [STATS, STATS_KL], ids=lambda op: op.name)
@pytest.mark.parametrize("target", [-100, 517, 2**33])
def test_one_lane_makes_nan_of_a_row_whose_target_is_out_of_range(op, target):
    inputs = op.inputs(Shape(5, 0, 517), torch.float32, "cpu")
    right = with_tile(op, SHORT)(**inputs)
    inputs["targets"][4] = target  # of the last row, after which nothing may be read
    stats = with_tile(op, SHORT)(**inputs)
    assert stats[0].isnan().tolist() == [False, False, False, False, True]
    assert all(torch.equal(a[:4], b[:4]) for a, b in zip(right, stats))
