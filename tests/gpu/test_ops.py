"""Every op on the device that is here: each implementation against its definition, and the losses that stream."""

import copy

import pytest
import torch
from hwgrpo_kernels import ReferenceHead, default_registry, linear_token_loss, token_logprob
from hwgrpo_kernels.head import Head, HeadGradients, multiplies_into_fp32

from tests.kernels.test_inplace import (  # noqa: F401  the same tests, with launches
    test_a_second_backward_is_refused,
    test_the_logits_are_untouched_until_backward_and_are_their_gradient_after_it,
    test_values_and_gradients_are_those_of_a_backward_that_is_not_in_place,
    test_who_needs_the_logits_after_they_are_gone_gets_torchs_error,
)
from tests.kernels.token_loss_cases import centred, full_kl, gspo, in_fp64, ppo, problem, relative, with_reference
from tests.support.numbers.op_agreement import assert_agrees, runnable
from tests.support.numbers.row_cases import DEVICE

SCOPES = [("token", ppo), ("sequence", gspo), ("batch", centred), ("token", full_kl)]
BOUNDS = [0, 5, 60, 61, 150, 193]
# Of the loss and of gradients against fp64 on the operands as rounded: what 16-bit logits lose, and what fp32's do not.
LOOSE, TIGHT = 3e-2, 2e-2


@pytest.mark.parametrize("op,implementation,dtype,case,shape", list(runnable(DEVICE)))
def test_implementation_equals_the_definition(op, implementation, dtype, case, shape):
    assert_agrees(op, implementation.function(), op.inputs(shape, dtype, DEVICE, case), dtype)


def on_device(p):
    """Copy a problem to the device, each trained tensor as a leaf of its own."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
        if isinstance(value, ReferenceHead):
            return ReferenceHead(*map(move, value))
        return {name: move(each) for name, each in value.items()} if isinstance(value, dict) else value

    there = copy.copy(p)
    vars(there).update({name: move(value) for name, value in vars(p).items()})
    return there


@pytest.mark.parametrize("scope,loss_fn", SCOPES, ids=lambda each: getattr(each, "__name__", each))
@pytest.mark.parametrize(
    "dtype,logits_dtype,tolerance",
    [(torch.float32, None, 2e-5), (torch.bfloat16, None, LOOSE), (torch.bfloat16, torch.float32, TIGHT)],
)
def test_loss_and_gradients_equal_fp64_autograd_on_full_logits(scope, loss_fn, dtype, logits_dtype, tolerance):
    with torch.device("cpu"):
        p = problem(dtype=dtype, bias=True)
        if loss_fn is full_kl:
            with_reference(p, h=30)
        bounds = torch.tensor(BOUNDS)
        truth = in_fp64(p, loss_fn, cu_seqlens=bounds if scope == "sequence" else None, temperature=0.7)
    there = on_device(p)
    result = linear_token_loss(
        there.hidden, there.weight, there.targets, loss_fn, rows=there.rows, bias=there.bias, scope=scope,
        cu_seqlens=bounds.to(DEVICE) if scope == "sequence" else None, temperature=0.7, chunk_rows=64,
        logits_dtype=logits_dtype, reference=there.reference,
    )  # fmt: skip
    result.loss.backward()
    assert abs(result.loss.item() - truth.loss.item()) <= tolerance * max(1.0, abs(truth.loss.item()))
    for mine, true in zip((there.hidden, there.weight, there.bias), truth.grads):
        assert relative(mine.grad.cpu(), true) <= tolerance


def test_a_target_out_of_range_is_nan_in_its_row_and_an_error_in_debug_mode(monkeypatch):
    logits, targets = torch.randn(3, 517), torch.tensor([5, 517, 7])
    for implementation in ("triton", "torch"):
        with default_registry.pinned({"row_stats": implementation}):
            assert token_logprob(logits, targets).logprob.isnan().tolist() == [False, True, False]
    monkeypatch.setenv("HWGRPO_DEBUG", "1")
    with pytest.raises(ValueError, match=r"targets contains 517, outside \[0, 517\)"):
        token_logprob(logits, targets)


def test_the_sum_over_chunks_is_as_exact_as_the_products_of_this_device():
    hidden, dlogits = torch.randn(64, 48).bfloat16(), torch.randn(64, 517).bfloat16()
    head = Head(torch.randn(517, 48).bfloat16(), None, torch.bfloat16, torch.bfloat16)
    gradients = HeadGradients(head, hidden, 16, hidden=False, weight=True, bias=False)
    for start in range(0, 64, 16):
        gradients.add(dlogits[start : start + 16].clone(), start)
    _, total, _ = gradients.finish()
    true = dlogits.double().T @ hidden.double()
    limit = 1e-5 if multiplies_into_fp32(total.device.type) else 2**-8
    assert (total.double() - true).norm() < limit * true.norm()
