"""A kernel that touches anything but the elements of its tensors fails here, though nothing might come of it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.interpreter.watched_memory import REFUSED


@triton.jit
def read_kernel(source, out, first, last, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(source + first + index, mask=index < last, other=0.0))


@triton.jit
def write_kernel(out, first, last, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + first + index, index.to(tl.float32), mask=index < last)


def rows_with_gaps():
    """Two rows of 12 in a buffer that goes on before, between and behind them."""
    return torch.zeros(4, 20)[1:3, 4:16]


@pytest.mark.parametrize("first,last", [(0, 12), (20, 12), (4, 8)], ids=["first row", "second row", "a part"])
def test_elements_are_read_and_written(first, last):
    rows, out = rows_with_gaps(), torch.ones(16)
    write_kernel[(1,)](rows, first, last, 16)
    read_kernel[(1,)](rows, out, first, last, 16)
    assert out.tolist() == [*range(last), *[0.0] * (16 - last)]


@pytest.mark.parametrize(
    "first,last", [(0, 13), (-1, 1), (20, 13), (40, 1)], ids=["gap", "before", "behind", "a third row"]
)
def test_what_is_no_element_is_neither_read_nor_written(first, last):
    rows = rows_with_gaps()
    with pytest.raises(InterpreterError, match=f"reads {REFUSED}"):
        read_kernel[(1,)](rows, torch.ones(16), first, last, 16)
    with pytest.raises(InterpreterError, match=f"writes {REFUSED}"):
        write_kernel[(1,)](rows, first, last, 16)
    assert not rows._base.any()


def test_a_tensor_that_only_lies_nearby_is_not_the_launch_s():
    memory = torch.zeros(64)
    with pytest.raises(InterpreterError, match=REFUSED):
        read_kernel[(1,)](memory[:16], memory[32:48], 16, 16, 16)


def test_what_a_kernel_leaves_out_of_a_result_is_nan():
    assert torch.empty(8).isnan().all()
    assert torch.zeros(8).new_empty(8).isnan().all()
    assert torch.empty_like(torch.zeros(8, dtype=torch.bfloat16)).isnan().all()
