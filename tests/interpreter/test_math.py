"""The functions the Triton kernels make from exp and log keep their digits where the plain formula loses them."""

import pytest
import torch
import triton
import triton.language as tl
from hwgrpo_kernels import triton_math


@triton.jit
def expm1_kernel(x, out, SIZE: tl.constexpr, TERMS: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, triton_math.expm1(tl.load(x + index), TERMS))


@triton.jit
def log1p_kernel(x, out, SIZE: tl.constexpr, TERMS: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, triton_math.log1p(tl.load(x + index), TERMS))


@triton.jit
def squash_kernel(x, out, slope, squash, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    z = tl.load(x + index)
    tl.store(out + index, triton_math.squashed(z, squash, True))
    tl.store(slope + index, triton_math.squash_slope(z, squash))


PRECISIONS = pytest.mark.parametrize("dtype,terms,tolerance", [(torch.float64, 16, 1e-15), (torch.float32, 8, 3e-7)])


def magnitudes(dtype):
    """512 numbers from 1e-30 to 80, evenly in the exponent, and both sides of 1/2."""
    points = torch.logspace(-30, 1.9, 510, dtype=torch.float64)
    return torch.cat([points, torch.tensor([0.4999999, 0.5000001], dtype=torch.float64)]).to(dtype)


@PRECISIONS
def test_expm1_of_negative_numbers_keeps_its_digits(dtype, terms, tolerance):
    x = -magnitudes(dtype)
    x[:2] = torch.tensor([0.0, -torch.inf])
    out = torch.empty_like(x)
    expm1_kernel[(1,)](x, out, 512, terms)
    torch.testing.assert_close(out.double(), torch.expm1(x.double()), rtol=tolerance, atol=0)


@PRECISIONS
def test_log1p_of_positive_numbers_keeps_its_digits(dtype, terms, tolerance):
    x = magnitudes(dtype)
    x[:2] = torch.tensor([0.0, torch.inf])
    out = torch.empty_like(x)
    log1p_kernel[(1,)](x, out, 512, terms)
    torch.testing.assert_close(out.double(), torch.log1p(x.double()), rtol=tolerance, atol=0)


def test_squash_is_tanh_and_its_slope_keeps_its_digits_where_tanh_saturates():
    x = torch.cat([magnitudes(torch.float32)[:511] * 3, torch.tensor([torch.inf])])
    x[::2] *= -1
    out, slope = torch.empty_like(x), torch.empty_like(x)
    squash_kernel[(1,)](x, out, slope, 1 / 3, 512)
    wide = x.double() / 3
    torch.testing.assert_close(out.double(), torch.tanh(wide), rtol=0, atol=2e-7)
    true = 1 / torch.cosh(wide) ** 2 / 3
    seen = true > 1e-30
    torch.testing.assert_close(slope.double()[seen], true[seen], rtol=2e-5, atol=0)
    assert slope[-1] == 0
