"""The repaired interpreter computes as a device does; unrepaired, each of these tests fails."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + row * SIZE + column), tl.load(b + row * SIZE + column))
    tl.store(out + row * SIZE + column, product)


@triton.jit
def convert_kernel(source, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(source + index).to(out.dtype.element_ty))


@triton.jit
def double_kernel(source, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(source + index)
    tl.store(out + index, value + value)


@triton.jit
def extremes_kernel(a, b, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x, y = tl.load(a + index), tl.load(b + index)
    tl.store(out + index, tl.maximum(x, y))
    tl.store(out + SIZE + index, tl.minimum(x, y))
    tl.store(out + 2 * SIZE + index, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


def test_dot_of_bf16_multiplies_values_and_accumulates_in_fp32():
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rounding_to_bf16_is_to_nearest_even_and_keeps_what_is_not_finite(wide):
    values = torch.randn(1024, dtype=torch.float32)
    values[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1 + 2**-8])  # the last is half-way
    out = torch.empty(1024, dtype=torch.bfloat16)
    convert_kernel[(1,)](values.to(wide), out, 1024)
    torch.testing.assert_close(out, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_widening_bf16_is_exact(wide):
    values = torch.randn(1024).bfloat16()
    out = torch.empty(1024, dtype=wide)
    convert_kernel[(1,)](values, out, 1024)
    assert torch.equal(out, values.to(wide))


def test_arithmetic_on_unconverted_bf16_is_refused():
    values = torch.randn(16).bfloat16()
    with pytest.raises(triton.runtime.errors.InterpreterError, match="convert to the accumulator's type first"):
        double_kernel[(1,)](values, torch.empty_like(values), 16)


def test_a_maximum_or_minimum_loses_nan_unless_it_is_to_propagate():
    a, b = torch.tensor([1.0, torch.nan, 3.0, torch.nan]), torch.tensor([2.0, 5.0, torch.nan, torch.nan])
    out = torch.empty(3, 4)
    extremes_kernel[(1,)](a, b, out, 4)
    expected = torch.stack([torch.fmax(a, b), torch.fmin(a, b), torch.maximum(a, b)])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
