"""The Triton kernel that dequantizes NF4 agrees with its definition, and writes nothing beyond its tensor."""

import pytest
import torch
from hwgrpo_kernels import Shape, default_registry, nf4_triton

from tests.support.numbers.op_agreement import DTYPES, assert_agrees
from tests.support.numbers.row_cases import DEVICE

[OP] = [op for op in default_registry.ops() if op.name == "dequantize_nf4"]
SIZES = [1, 2, 63, 64, 65, 2 * nf4_triton.PAIRS - 1, 2 * nf4_triton.PAIRS, 2 * nf4_triton.PAIRS + 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", OP.cases)
def test_kernel_equals_the_definition(case, dtype):
    assert_agrees(OP, nf4_triton.dequantize_nf4, OP.inputs(Shape(3, 0, 1517), dtype, DEVICE, case), dtype)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_around_a_block_and_a_program_is_written_whole_and_no_more(size):
    inputs = OP.inputs(Shape(1, 0, size), torch.bfloat16, DEVICE)
    beyond = torch.full((size + 8,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    inputs["out"] = beyond[:size]
    nf4_triton.dequantize_nf4(**inputs)
    on_host = {name: value.cpu() for name, value in inputs.items()}
    assert torch.equal(beyond[:size].cpu(), OP.definition(**on_host | {"out": torch.empty(size, dtype=torch.bfloat16)}))
    assert (beyond[size:] == 7.0).all()
