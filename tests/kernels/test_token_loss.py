"""linear_token_loss against fp64 autograd on full logits, in every scope, chunking and precision."""

from typing import Any

import pytest
import torch
from hwgrpo_kernels import TokenLoss, linear_token_loss, weight_operand
from hwgrpo_kernels.precomputed_gradients import invalidate_unless_one
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.kernels.token_loss_cases import HEAD, centred, gspo, in_fp64, ppo, problem, relative
from tests.support.numbers.rounding import assert_values_close

CU = torch.tensor([0, 40, 40, 97, 150, 193])
SCOPES = [("token", ppo, None), ("sequence", gspo, CU), ("batch", centred, None), ("batch", ppo, None)]


def run(p, loss_fn, **arguments) -> tuple[TokenLoss, list[Any]]:
    """Forward and backward; returns the TokenLoss and the gradients."""
    for each in (p.hidden, p.weight, p.bias):
        if each is not None:
            each.grad = None
    result = linear_token_loss(p.hidden, p.weight, p.targets, loss_fn, rows=p.rows, bias=p.bias, **arguments)
    if result.loss.requires_grad:
        result.loss.backward()
    return result, [None if each is None else each.grad for each in (p.hidden, p.weight, p.bias)]


def gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient a backward left on a leaf."""
    assert leaf.grad is not None
    return leaf.grad


def assert_equal_to_fp64(result, grads, truth, tolerance=HEAD):
    assert abs(result.loss.item() - truth.loss.item()) <= tolerance * max(1.0, abs(truth.loss.item()))
    for name, total in truth.sums.items():
        assert abs(result.sums[name].item() - total.item()) <= tolerance * max(1.0, abs(total.item())), name
    for name, grad, true in zip(("hidden", "weight", "bias"), grads, truth.grads):
        if grad is not None:
            assert relative(grad, true) < tolerance, name


@pytest.mark.parametrize("chunk_rows", [None, 64, 50])
@pytest.mark.parametrize("scope,loss_fn,cu", SCOPES)
def test_gradients_equal_fp64_autograd(scope, loss_fn, cu, chunk_rows):
    p = problem()
    result, grads = run(p, loss_fn, scope=scope, cu_seqlens=cu, temperature=0.7, chunk_rows=chunk_rows)
    truth = in_fp64(p, loss_fn, cu_seqlens=cu, temperature=0.7)
    assert_equal_to_fp64(result, grads, truth)
    torch.testing.assert_close(result.logprob_N.double(), truth.logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy_N.double(), truth.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [None, 40])
def test_bias_softcap_logit_scale_and_a_temperature_per_row_reach_every_gradient(chunk_rows):
    p = problem(bias=True)
    how = {"temperature": torch.rand(193) + 0.5, "softcap": 3.0, "logit_scale": 0.8}
    mask = torch.arange(193) % 4 != 1
    result, grads = run(p, ppo, chunk_rows=chunk_rows, row_mask=mask, **how)
    assert_equal_to_fp64(result, grads, in_fp64(p, ppo, mask=mask, **how))


@pytest.mark.parametrize("scope,loss_fn,cu", SCOPES)
def test_masked_rows_count_for_nothing(scope, loss_fn, cu):
    p = problem()
    mask = torch.rand(193) > 0.4
    p.targets[~mask] = -100
    with torch.no_grad():
        p.hidden[~mask] = torch.nan
    result, grads = run(p, loss_fn, scope=scope, cu_seqlens=cu, row_mask=mask, chunk_rows=60)
    with torch.no_grad():
        p.hidden[~mask] = 0.0
    truth = in_fp64(p, loss_fn, mask=mask, cu_seqlens=cu)
    assert_equal_to_fp64(result, grads, truth)
    assert grads[0][~mask].abs().max() == 0
    assert result.logprob_N[~mask].abs().max() == 0
    torch.testing.assert_close(result.logprob_N[mask].double(), truth.logprob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scope,loss_fn,cu", SCOPES)
def test_chunk_size_does_not_change_the_result(scope, loss_fn, cu):
    p = problem()
    whole, grads = run(p, loss_fn, scope=scope, cu_seqlens=cu, chunk_rows=193)
    for chunk_rows in (1, 57, 58, 192, 194):
        part, part_grads = run(p, loss_fn, scope=scope, cu_seqlens=cu, chunk_rows=chunk_rows)
        assert_values_close(part.loss, whole.loss, HEAD)
        assert_values_close(part.logprob_N, whole.logprob_N, HEAD)
        assert relative(part_grads[0], grads[0]) < HEAD
        assert relative(part_grads[1], grads[1]) < HEAD


def test_scope_sequence_hands_whole_sequences_and_their_offsets():
    p, seen = problem(), []

    def watch(stats, rows):
        seen.append((stats.cu_seqlens.tolist(), len(stats.logprob), rows["old"][0].item()))
        return gspo(stats, rows)

    run(p, watch, scope="sequence", cu_seqlens=CU, chunk_rows=100)
    first = p.rows["old"]
    assert seen == [([0, 40, 40, 97], 97, first[0].item()), ([0, 53, 96], 96, first[97].item())]
    seen.clear()
    run(p, watch, scope="sequence", cu_seqlens=CU, chunk_rows=50)
    assert seen == [(CU.tolist(), 193, first[0].item())]


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("bias", "weight"), ("hidden", "weight")])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    p = problem(bias=True, frozen=frozen)
    result, grads = run(p, ppo, chunk_rows=64)
    assert [grad is None for grad in grads] == [name in frozen for name in ("hidden", "weight", "bias")]
    assert_equal_to_fp64(result, grads, in_fp64(p, ppo))


def test_without_any_gradient_the_loss_is_still_right():
    p = problem(frozen=("hidden", "weight"))
    result, _ = run(p, ppo)
    assert not result.loss.requires_grad
    assert_equal_to_fp64(result, [], in_fp64(p, ppo))
    trainable = problem()
    with torch.no_grad():
        again = linear_token_loss(trainable.hidden, trainable.weight, trainable.targets, ppo, rows=trainable.rows)
    assert not again.loss.requires_grad
    assert again.loss.item() == result.loss.item()


class CountGemms(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "frozen,scope,per_chunk",
    [((), "token", 3), (("weight",), "token", 2), (("hidden",), "token", 2), ((), "batch", 4)],
)
def test_each_chunk_costs_only_the_products_that_are_needed(frozen, scope, per_chunk):
    with CountGemms() as gemms:
        run(problem(frozen=frozen), ppo, scope=scope, chunk_rows=64)
    assert gemms.count == 4 * per_chunk


@pytest.mark.parametrize("n,mask", [(0, None), (193, torch.zeros(193, dtype=torch.bool))])
@pytest.mark.parametrize("scope,loss_fn,cu", SCOPES)
def test_no_rows_give_a_zero_loss_with_a_graph_zero_gradients_and_the_names_of_the_sums(n, mask, scope, loss_fn, cu):
    p = problem(n=n, bias=True)
    cu = None if cu is None else (cu if n else torch.tensor([0, 0]))
    result, grads = run(p, loss_fn, scope=scope, row_mask=mask, cu_seqlens=cu)
    assert result.loss.item() == 0
    assert result.loss.requires_grad
    assert [list(grad.shape) for grad in grads] == [[n, 70], [517, 70], [517]]
    assert all(not grad.count_nonzero() for grad in grads)
    expected, _ = run(problem(bias=True), loss_fn, scope=scope, cu_seqlens=None if cu is None else CU)
    assert {name: total.item() for name, total in result.sums.items()} == dict.fromkeys(expected.sums, 0.0)


def test_one_row_and_a_loss_without_entropy():
    def nll(stats, rows):
        return -stats.logprob * rows["weight"], {}

    p = problem(n=1)
    result, grads = run(p, nll)
    assert_equal_to_fp64(result, grads, in_fp64(p, nll))
    assert result.sums == {}


def test_loss_that_is_constant_or_uses_entropy_alone():
    p = problem()

    def constant(stats, rows):
        return rows["weight"] * 2, {}

    result, grads = run(p, constant)
    assert abs(result.loss.item() - 2) < 2 * HEAD
    assert not any(grad.count_nonzero() for grad in grads[:2])

    def entropy(stats, rows):
        return rows["weight"] * stats.entropy, {}

    result, grads = run(p, entropy, chunk_rows=64)
    assert_equal_to_fp64(result, grads, in_fp64(p, entropy))


def test_grad_output_scales_the_gradients():
    p = problem()
    _, grads = run(p, ppo)
    p.hidden.grad = p.weight.grad = None
    (linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows).loss * 0.5).backward()
    torch.testing.assert_close(p.hidden.grad, grads[0] * 0.5)
    torch.testing.assert_close(p.weight.grad, grads[1] * 0.5)


def test_gradients_promised_to_be_final_are_bitwise_those_of_a_backward_without_the_promise():
    p = problem(bias=True)
    (_, expected), (_, final) = run(p, ppo), run(p, ppo, final_gradients=True)
    for each, other in zip(final, expected, strict=True):
        assert torch.equal(each, other)


def test_a_promise_of_final_gradients_is_refused_where_the_loss_is_multiplied():
    p = problem()
    loss = linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows, final_gradients=True).loss
    with pytest.raises(RuntimeError, match=r"its loss is multiplied by 0\.5: multiply in loss_fn"):
        (loss * 0.5).backward()
    assert p.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_a_device_cannot_be_asked_a_broken_promise_makes_every_gradient_nan_and_a_kept_one_changes_none(dtype):
    gradients = [torch.randn(5, 3).to(dtype), torch.randn(7, 3), torch.randn(7), torch.randn(0, 3)]
    before = [each.clone() for each in gradients]
    invalidate_unless_one(gradients, torch.ones(()))
    assert all(torch.equal(each, other) for each, other in zip(gradients, before, strict=True))
    invalidate_unless_one(gradients, torch.tensor(1 + 2**-23))
    assert [bool(each.isnan().any()) for each in gradients] == [True, True, True, False]


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_a_weight_cast_once_for_several_calls_gives_bitwise_what_a_cast_in_each_gives(logits_dtype):
    p = problem(n=64, dtype=torch.bfloat16)
    p.weight = p.weight.detach().float().requires_grad_()
    expected, grads = run(p, ppo, logits_dtype=logits_dtype)
    operand = weight_operand(p.weight, torch.bfloat16, logits_dtype or torch.bfloat16)
    found, same = run(p, ppo, logits_dtype=logits_dtype, weight_operand_VH=operand)
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(each, other) for each, other in zip(same[:2], grads[:2], strict=True))
    assert gradient_of(p.weight).dtype == torch.float32
    assert weight_operand(operand, operand.dtype, operand.dtype).data_ptr() == operand.data_ptr()


def test_gradients_accumulate_over_calls():
    a, b = problem(seed=0), problem(seed=1)
    run(a, ppo)
    first = a.weight.grad.clone()
    second = linear_token_loss(b.hidden, a.weight, b.targets, ppo, rows=b.rows)
    second.loss.backward()
    b.weight = a.weight
    truth = in_fp64(b, ppo)
    assert relative(a.weight.grad, first.double() + truth.grads[1]) < HEAD


def test_tied_weight_gets_the_gradient_of_both_uses():
    p = problem(h=32)
    tokens = torch.randint(517, (193,))
    table = p.weight.detach().clone().requires_grad_()
    linear_token_loss(torch.tanh(table[tokens]), table, p.targets, ppo, rows=p.rows, chunk_rows=64).loss.backward()
    wide = p.weight.detach().double().requires_grad_()
    p.hidden, p.weight = torch.tanh(wide[tokens]), wide
    truth = in_fp64(p, ppo)
    (through_hidden,) = torch.autograd.grad(p.hidden, wide, truth.grads[0])
    assert relative(gradient_of(table), truth.grads[1] + through_hidden) < HEAD


def test_bf16_is_as_exact_as_plain_bf16_and_gradients_come_in_the_parameters_dtype():
    p = problem(n=512, dtype=torch.bfloat16, bias=True)
    truth = in_fp64(p, ppo)
    _, grads = run(p, ppo, chunk_rows=64)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3
    leaves = [each.detach().clone().requires_grad_() for each in (p.hidden, p.weight, p.bias)]
    logprobs = torch.nn.functional.linear(*leaves).float().log_softmax(1)
    logprob = logprobs.gather(1, p.targets[:, None])[:, 0]
    stats = type("Stats", (), {"logprob": logprob, "entropy": -(logprobs.exp() * logprobs).sum(1)})
    ppo(stats, p.rows)[0].sum().backward()
    for grad, plain, true in zip(grads, leaves, truth.grads):
        assert relative(grad, true) < 2 * relative(plain.grad, true)
    exact, exact_grads = run(p, ppo, chunk_rows=64, logits_dtype=torch.float32)
    assert_values_close(exact.loss, truth.loss, HEAD)
    assert all(relative(grad, true) < 2**-8 for grad, true in zip(exact_grads, truth.grads))


def test_weight_gradient_accumulates_wider_than_bf16_over_many_chunks():
    p = problem(n=2048, h=16, v=32, dtype=torch.bfloat16)
    _, few = run(p, ppo, chunk_rows=2048)
    _, many = run(p, ppo, chunk_rows=4)
    assert relative(many[1], few[1]) < 2**-8


def test_autocast_rounds_like_a_linear_layer_and_returns_fp32_gradients():
    p = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = []

        def watched(stats, rows):
            seen.append((stats.logprob.dtype, torch.is_autocast_enabled("cpu")))
            return ppo(stats, rows)

        result, grads = run(p, watched)
    assert seen == [(torch.float32, False)]
    assert [grad.dtype for grad in grads[:2]] == [torch.float32] * 2
    logits = torch.nn.functional.linear(p.hidden.bfloat16(), p.weight.bfloat16()).float()
    expected = logits.log_softmax(1).gather(1, p.targets[:, None])[:, 0]
    torch.testing.assert_close(result.logprob_N, expected.detach(), rtol=1e-5, atol=1e-5)
    truth = in_fp64(p, ppo)
    assert all(relative(grad, true) < 2e-2 for grad, true in zip(grads[:2], truth.grads))


def test_fp64_inputs_compute_in_fp64():
    p = problem(dtype=torch.float64)
    p.rows = {name: each.double() for name, each in p.rows.items()}
    result, grads = run(p, ppo, chunk_rows=64, temperature=0.7)
    assert_equal_to_fp64(result, grads, in_fp64(p, ppo, temperature=0.7), tolerance=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements any op returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return out


@pytest.mark.parametrize("scope,loss_fn,cu", SCOPES)
def test_logits_of_all_rows_never_exist(scope, loss_fn, cu):
    p = problem(h=8)
    with LargestTensor() as largest:
        run(p, loss_fn, scope=scope, cu_seqlens=cu, chunk_rows=57)
    assert 0 < largest.numel <= 57 * 528  # 517 fp32 logits, and the next row on 64 bytes


def test_backward_twice_is_refused():
    p = problem()
    loss = linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call linear_token_loss again"):
        loss.backward()


def test_differentiating_the_gradient_is_refused():
    p = problem()
    loss = linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows).loss
    (grad,) = torch.autograd.grad(loss * loss, p.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_region_is_refused(reentrant):
    p = problem()

    def region(hidden):
        return linear_token_loss(hidden, p.weight, p.targets, ppo, rows=p.rows).loss

    with pytest.raises(RuntimeError, match="checkpoint the backbone"):
        checkpoint(region, p.hidden, use_reentrant=reentrant).backward()


def test_compiled_region_is_refused():
    p = problem()

    def region(hidden):
        return linear_token_loss(hidden, p.weight, p.targets, ppo, rows=p.rows).loss

    with pytest.raises(Exception, match="outside of the compiled region"):
        torch.compile(region, backend="eager", fullgraph=True)(p.hidden)


def test_rows_of_any_rank_are_cut_alike():
    p = problem()
    p.rows["pair"] = torch.stack([p.rows["advantage"], p.rows["weight"]], 1)

    def paired(stats, rows):
        return ppo(stats, {**rows, "advantage": rows["pair"][:, 0], "weight": rows["pair"][:, 1]})

    plain, grads = run(p, ppo, chunk_rows=64)
    result, paired_grads = run(p, paired, chunk_rows=64)
    assert result.loss.item() == plain.loss.item()
    assert torch.equal(paired_grads[0], grads[0])
