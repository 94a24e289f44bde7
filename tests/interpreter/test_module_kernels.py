"""The fused modules in Triton equal their definitions in fp64: values and gradients, in any layout."""

import pytest
import torch
from hwgrpo_kernels import module_triton

from tests.support.numbers.row_cases import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNITS = 4
"""Units in the last place: of fp32 arithmetic that is rounded once, relative to the largest entry."""


def random(*size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, device="cpu").to(DEVICE, dtype)


def in_fp64(function, tensors, upstream):
    """Return the value and the gradients of a function by autograd in fp64, on the host."""
    leaves = [each.detach().cpu().double().requires_grad_(each.requires_grad) for each in tensors]
    value = function(*leaves)
    return value, torch.autograd.grad(value, [each for each in leaves if each.requires_grad], upstream.cpu().double())


def assert_equal(function, definition, *tensors, terms=1):
    """Compare value and gradients; `terms` are added up in fp32 for the longest sum."""
    value = function(*tensors)
    upstream = random(*value.shape, dtype=value.dtype, seed=9)
    gradients = torch.autograd.grad(value, [each for each in tensors if each.requires_grad], upstream)
    true, true_gradients = in_fp64(definition, tensors, upstream)
    for found, exact in zip((value, *gradients), (true, *true_gradients), strict=True):
        assert found.shape == exact.shape
        units = UNITS * torch.finfo(found.dtype).eps + terms * torch.finfo(torch.float32).eps
        assert (found.cpu().double() - exact).abs().max() <= units * exact.abs().max().clamp_min(1e-30)


def rms_norm(x, weight):
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (5, 64), (2, 9, 100), (3, 4097), (67, 48)])
def test_rms_norm_and_its_gradients(shape, dtype):
    x, weight = random(*shape, dtype=dtype).requires_grad_(), random(shape[-1], dtype=torch.float32).requires_grad_()
    found = module_triton.rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.float32
    assert_equal(lambda x, w: module_triton.rms_norm(x, w, 1e-6), rms_norm, x, weight, terms=max(shape))


def test_rms_norm_of_rows_that_lie_apart_with_a_frozen_weight_in_16_bits():
    x = random(7, 2, 70, dtype=torch.bfloat16)[:, 0, :64].requires_grad_()
    weight = random(64, dtype=torch.bfloat16)
    assert module_triton.rms_norm(x, weight, 1e-6).dtype == torch.bfloat16
    assert_equal(lambda x, w: module_triton.rms_norm(x, w, 1e-6), rms_norm, x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_and_its_norm_with_their_gradients(dtype):
    x, update = random(7, 100, dtype=torch.float32).requires_grad_(), random(7, 100, dtype=dtype, seed=1)
    weight = random(100, dtype=torch.float32).requires_grad_()

    def both(add):
        return lambda *tensors: torch.stack([each.to(tensors[0].dtype) for each in add(*tensors)])

    assert_equal(
        both(lambda x, u, w: module_triton.add_rms_norm(x, u, w, 1e-6)),
        both(lambda x, u, w: (x + u, rms_norm(x + u, w))),
        *(x, update.requires_grad_(), weight),
        terms=100,
    )


def test_the_gradient_of_the_weight_is_the_same_each_time():
    x, weight = random(300, 64, dtype=torch.float32), random(64, dtype=torch.float32).requires_grad_()
    once, again = (
        torch.autograd.grad(module_triton.rms_norm(x, weight, 1e-6).square().sum(), weight)[0] for _ in range(2)
    )
    assert torch.equal(once, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 100), (2, 4099)])
def test_swiglu_and_its_gradients(shape, dtype):
    gate, up = (random(*shape, dtype=dtype, seed=seed).mul(3).requires_grad_() for seed in (1, 2))
    assert_equal(module_triton.swiglu, lambda g, u: torch.nn.functional.silu(g) * u, gate, up)


def test_swiglu_of_the_halves_of_one_tensor():
    both = random(6, 200, dtype=torch.bfloat16).requires_grad_()
    assert_equal(
        lambda x: module_triton.swiglu(*x.chunk(2, -1)),
        lambda x: torch.nn.functional.silu(x[:, :100]) * x[:, 100:],
        both,
    )


@pytest.mark.parametrize("dtype,angles", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("heads,size,rows", [(1, 16, 1), (9, 20, 2), (14, 64, 2)])
@pytest.mark.parametrize("heads_first", [True, False])
def test_rotation_and_its_gradient(heads, size, rows, heads_first, dtype, angles):
    x = (
        random(2, heads, 5, size, dtype=dtype)
        if heads_first
        else random(2, 5, heads, size, dtype=dtype).transpose(1, 2)
    )
    x.requires_grad_()
    cos, sin = (random(rows, 5, size, dtype=angles, seed=seed) for seed in (1, 2))

    def halves(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    found = module_triton.rotate_halves(x, cos, sin)
    assert found.dtype == torch.promote_types(dtype, angles)
    assert found.stride() == x.stride()
    assert_equal(module_triton.rotate_halves, halves, x, cos, sin)


def test_nothing_is_left_out_and_nothing_is_launched_without_rows():
    empty = torch.empty(0, 64, device=DEVICE, requires_grad=True)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    for value in (
        module_triton.rms_norm(empty, weight, 1e-6),
        module_triton.swiglu(empty, empty.clone()),
        module_triton.rotate_halves(empty.view(1, 2, 0, 64), empty.view(1, 0, 64), empty.view(1, 0, 64)),
    ):
        assert value.numel() == 0
        value.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
