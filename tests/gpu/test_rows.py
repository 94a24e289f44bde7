"""The Triton row kernels, launched: the interpreter's tests on the device, and what an interpreter cannot show."""

import pytest
import torch
from hwgrpo_kernels.op import Shape

from tests.interpreter.test_math import *  # noqa: F403
from tests.interpreter.test_rows import *  # noqa: F403
from tests.interpreter.test_rows_memory import *  # noqa: F403
from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import DEVICE, GRAD, GRAD_KL, NARROW, PERSISTENT, ROW_OPS, from_table, with_tile

each_op = pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)


@each_op
def test_programs_that_take_many_rows_each_agree(op):
    processors = torch.cuda.get_device_properties(0).multi_processor_count  # hw: what a persistent grid is made from
    rows = 2 * PERSISTENT.per_processor * processors + 5
    inputs = op.inputs(Shape(rows, 0, 517), torch.float32, DEVICE, "row_scale")
    assert_agrees(op, with_tile(op, PERSISTENT), inputs, torch.float32)


@each_op
@pytest.mark.parametrize("vocab", [50257, 151936, 151937])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vocabularies_of_models_agree(op, vocab, dtype):
    assert_agrees(op, from_table(op), op.inputs(Shape(6, 0, vocab), dtype, DEVICE), dtype)


@each_op
def test_the_same_call_gives_the_same_bits(op):
    inputs = op.inputs(Shape(40, 0, 151936), torch.bfloat16, DEVICE)
    runs = [from_table(op)(**inputs) for _ in range(2)]
    first, second = ([each.clone() for each in (run if isinstance(run, tuple) else (run,))] for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@each_op
def test_rows_beyond_2_31_elements_are_found(op):
    vocab, stride = 517, 2**30 + 64
    far = torch.empty(2 * stride + vocab, dtype=torch.bfloat16).as_strided((3, vocab), (stride, 1))
    inputs = op.inputs(Shape(3, 0, vocab), torch.bfloat16, DEVICE)
    far.copy_(inputs["logits"])
    inputs["logits"] = far
    if op in (GRAD, GRAD_KL):
        inputs["out"] = far
    for tile in (NARROW, PERSISTENT) if op not in (GRAD, GRAD_KL) else (NARROW,):
        assert_agrees(op, with_tile(op, tile), inputs, torch.bfloat16)
