"""The KL over the whole vocabulary: as a statistic and in the gradients of linear_token_loss, against fp64 autograd."""

import pytest
import torch
from hwgrpo_kernels import ReferenceHead, default_registry, definitions, linear_token_loss, rows_torch
from hwgrpo_kernels.head import Head

from tests.kernels.test_token_loss import CU, CountGemms, assert_equal_to_fp64
from tests.kernels.token_loss_cases import full_kl, in_fp64, ppo, problem, relative, with_reference

OPS = {op.name: op for op in default_registry.ops()}


def run(p, loss_fn=full_kl, **arguments):
    result = linear_token_loss(
        p.hidden, p.weight, p.targets, loss_fn, rows=p.rows, bias=p.bias, reference=p.reference, **arguments
    )
    if result.loss.requires_grad:
        result.loss.backward()
    return result, [None if each is None else each.grad for each in (p.hidden, p.weight, p.bias)]


@pytest.mark.parametrize("chunk_rows", [None, 64, 50])
@pytest.mark.parametrize("scope", ["token", "sequence", "batch"])
def test_loss_kl_and_gradients_equal_fp64_autograd_on_full_logits(scope, chunk_rows):
    p = with_reference(problem(), h=30)
    result, grads = run(p, scope=scope, cu_seqlens=CU, temperature=0.7, chunk_rows=chunk_rows)
    truth = in_fp64(p, full_kl, temperature=0.7)
    assert_equal_to_fp64(result, grads, truth)
    torch.testing.assert_close(result.kl_N.double(), truth.kl, rtol=1e-5, atol=1e-5)
    assert truth.kl.mean() > 0.5


def test_bias_softcap_logit_scale_temperature_per_row_and_mask_reach_both_sides():
    p = with_reference(problem(bias=True), bias=True)
    how = {"temperature": torch.rand(193) + 0.5, "softcap": 3.0, "logit_scale": 0.8}
    mask = torch.arange(193) % 4 != 1
    result, grads = run(p, chunk_rows=40, row_mask=mask, **how)
    truth = in_fp64(p, full_kl, mask=mask, **how)
    assert_equal_to_fp64(result, grads, truth)
    assert result.kl_N[~mask].abs().max() == 0
    torch.testing.assert_close(result.kl_N[mask].double(), truth.kl, rtol=1e-5, atol=1e-5)


def test_a_reference_near_the_policy_with_its_very_head_gives_a_small_kl_with_its_digits():
    p = with_reference(problem(frozen=("weight",)), near=True)
    result, grads = run(p, chunk_rows=64)
    truth = in_fp64(p, full_kl)
    assert 0 < truth.kl.mean() < 1e-3
    assert_equal_to_fp64(result, grads, truth)
    torch.testing.assert_close(result.kl_N.double(), truth.kl, rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy_bias,reference_bias", [(True, False), (False, True)])
def test_the_policys_very_weight_with_another_bias_is_another_head(policy_bias, reference_bias):
    p = problem(bias=policy_bias)
    p.reference = ReferenceHead(p.hidden.detach(), p.weight, torch.randn(517) if reference_bias else None)
    result, grads = run(p, chunk_rows=64)
    assert_equal_to_fp64(result, grads, in_fp64(p, full_kl))


def test_bf16_logits_are_as_close_as_those_of_the_loss_without_a_reference():
    p = with_reference(problem(dtype=torch.bfloat16))
    _, grads = run(p, chunk_rows=64)
    truth = in_fp64(p, full_kl)
    alone = problem(dtype=torch.bfloat16)
    result = linear_token_loss(alone.hidden, alone.weight, alone.targets, ppo, rows=alone.rows, chunk_rows=64)
    result.loss.backward()
    plain = in_fp64(alone, ppo)
    assert relative(grads[0], truth.grads[0]) < 2 * relative(alone.hidden.grad, plain.grads[0])
    assert relative(grads[1], truth.grads[1]) < 2 * relative(alone.weight.grad, plain.grads[1])


def test_a_loss_that_leaves_the_kl_alone_has_the_gradients_of_the_loss_without_a_reference():
    beside, alone = with_reference(problem()), problem()
    with_it, its_grads = run(beside, ppo, chunk_rows=64)
    without, grads = run(alone, ppo, chunk_rows=64)
    assert with_it.loss.item() == without.loss.item()
    assert all(torch.equal(a, b) for a, b in zip(its_grads[:2], grads[:2]))
    assert without.kl_N is None


@pytest.mark.parametrize("scope,per_chunk", [("token", 4), ("batch", 6)])
def test_reference_logits_cost_one_product_per_chunk_and_pass(scope, per_chunk):
    p = with_reference(problem())
    with CountGemms() as gemms:
        linear_token_loss(
            p.hidden, p.weight, p.targets, full_kl, rows=p.rows, reference=p.reference, scope=scope, chunk_rows=50
        )
    assert gemms.count == 4 * per_chunk


def test_nothing_of_the_reference_gets_a_gradient():
    p = problem()
    hidden, weight = torch.randn(193, 30, requires_grad=True), torch.randn(517, 30, requires_grad=True)
    p.reference = ReferenceHead(hidden, weight)
    run(p)
    assert hidden.grad is None
    assert weight.grad is None


def test_with_a_reference_the_default_chunk_has_half_the_rows():
    seen = []

    def watch(stats, rows):
        seen.append(len(stats.logprob))
        return ppo(stats, rows)

    p = problem(n=1100, h=4, v=2048)
    run(p, watch)
    assert seen == [1024, 76]
    seen.clear()
    run(with_reference(p), watch)
    assert seen == [512, 512, 76]


def test_a_head_with_its_own_buffer_leaves_the_first_ones_logits_alone():
    head = Head(torch.randn(40, 8), None, torch.float32, torch.float32)
    logits = head.logits(torch.randn(5, 8))
    kept = logits.clone()
    head.with_own_buffer().logits(torch.randn(5, 8))
    assert torch.equal(logits, kept)


def test_without_rows_the_kl_is_empty_and_metrics_have_their_names():
    p = with_reference(problem(n=0))
    result, _ = run(p)
    assert result.kl_N.shape == (0,)
    assert result.sums.keys() == {"kl", "k1"}


@pytest.mark.parametrize(
    "reference,complaint",
    [
        ((torch.zeros(193, 70), torch.zeros(517, 70)), "reference must be a ReferenceHead.*got tuple"),
        (
            ReferenceHead(torch.zeros(193, 70), torch.zeros(517, 69)),
            "reference: weight_VH is .* H=69.*hidden_NH has H=70",
        ),
        (ReferenceHead(torch.zeros(19, 70), torch.zeros(517, 70)), "reference has 19 rows, but hidden_NH has N=193"),
        (ReferenceHead(torch.zeros(193, 70), torch.zeros(500, 70)), "vocabulary of 500, but weight_VH has V=517"),
        (ReferenceHead(*(torch.zeros(n, 70, device="meta") for n in (193, 517))), "reference is on meta"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused_by_what_is_wrong(reference, complaint):
    p = problem()
    p.reference = reference
    with pytest.raises(ValueError, match=complaint):
        run(p)


@pytest.mark.parametrize("case", ["near", "certain", "ref_offset"])
def test_the_gradient_of_the_kl_alone_keeps_its_digits(case):
    op = OPS["row_grad_kl"]
    inputs = op.inputs(op.shapes[0], torch.float32, "cpu", case)
    inputs["grad_logprob"] = torch.zeros_like(inputs["grad_logprob"])
    inputs["grad_entropy"] = inputs["entropy"] = None
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    true = definitions.row_grad_kl(**wide)
    out = rows_torch.row_grad_kl(**inputs)
    assert relative(out, true) < 1e-4
    here = inputs["grad_kl"] != 0
    y = inputs["targets"][here, None]
    error = (out[here].gather(1, y) - true[here].gather(1, y)).abs()
    assert (error <= 1e-4 * true[here].norm(dim=1, keepdim=True)).all()


def test_a_token_that_only_the_policy_can_draw_makes_the_kl_infinite_and_one_that_only_the_reference_can_adds_nothing():
    logits, ref = torch.zeros(2, 4), torch.zeros(2, 4)
    ref[0, 1] = -torch.inf
    logits[1, 1] = -torch.inf
    kl = rows_torch.row_stats_kl(logits, ref, torch.tensor([0, 0]), 1.0, 0.0, None)[4]
    assert kl[0] == torch.inf
    torch.testing.assert_close(kl[1], torch.tensor(4 / 3).log())


@pytest.mark.parametrize("side", ["logits", "ref_logits"])
def test_a_nan_among_the_logits_shows_in_the_kl_and_its_gradient(side):
    stats, grad = OPS["row_stats_kl"], OPS["row_grad_kl"]
    inputs = stats.inputs(stats.shapes[0], torch.float32, "cpu", "plain")
    inputs[side][2, 7] = torch.nan
    kl = rows_torch.row_stats_kl(**inputs)[4]
    assert kl.isnan().tolist() == [row == 2 for row in range(len(kl))]
    inputs = grad.inputs(grad.shapes[0], torch.float32, "cpu", "plain")
    inputs[side][2, 7] = torch.nan
    assert rows_torch.row_grad_kl(**inputs)[2, 7].isnan()
