"""token_logprob and linear_logprob: numbers at the edges, gradients, custom-op contracts, compilation, memory."""

from typing import Any

import pytest
import torch
from hwgrpo_kernels import default_registry, library, linear_logprob, token_logprob
from hwgrpo_kernels.chunks import chunk_rows_for, even_chunks, sequence_chunks
from hwgrpo_kernels.head import Head

from tests.kernels.test_token_loss import LargestTensor, gradient_of
from tests.kernels.token_loss_cases import HEAD, problem, relative


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float | torch.Tensor = 1.0):
    logprobs = (logits.double() / temperature).log_softmax(1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_common_offset_costs_no_digits(offset):
    logits = torch.randint(-40, 40, (193, 517)) / 8.0 + offset
    targets = torch.randint(517, (193,))
    got = token_logprob(logits, targets, temperature=0.7, with_entropy=True)
    logprob, entropy = plain(logits, targets, 0.7)
    torch.testing.assert_close(got.logprob.double(), logprob, rtol=2e-6, atol=2e-6)
    assert got.entropy is not None
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=5e-6, atol=5e-6)


def test_a_nearly_certain_target_keeps_its_digits():
    logits = torch.zeros(5, 300)
    logits[:, 7] = torch.tensor([5.0, 12.0, 20.0, 30.0, 60.0])
    leaf = logits.clone().requires_grad_()
    targets = torch.full((5,), 7)
    logprob = token_logprob(leaf, targets).logprob
    true = -torch.log1p(299 * torch.exp(-logits[:, 7].double()))
    torch.testing.assert_close(logprob.detach().double(), true, rtol=1e-5, atol=0)
    logprob.sum().backward()
    torch.testing.assert_close(gradient_of(leaf)[:, 7].double(), -torch.expm1(true), rtol=1e-5, atol=0)


def test_a_row_of_only_minus_infinity_is_defined_and_has_no_gradient():
    leaf = torch.randn(4, 9)
    leaf[2] = -torch.inf
    leaf.requires_grad_()
    got = token_logprob(leaf, torch.tensor([0, 1, 2, 3]), with_entropy=True)
    assert got.entropy is not None
    assert got.logprob[2] == -torch.inf
    assert got.entropy[2] == 0
    (got.logprob + got.entropy).sum().backward()
    assert gradient_of(leaf).isfinite().all()
    assert gradient_of(leaf)[2].count_nonzero() == 0
    assert gradient_of(leaf)[1].count_nonzero() == 9


def test_entries_at_minus_infinity_have_no_probability_and_no_gradient():
    leaf = torch.randn(6, 20)
    leaf[:, 10:] = -torch.inf
    leaf.requires_grad_()
    targets = torch.arange(6)
    got = token_logprob(leaf, targets, with_entropy=True)
    logprob, entropy = plain(leaf.detach()[:, :10], targets)
    assert got.entropy is not None
    torch.testing.assert_close(got.logprob.detach().double(), logprob, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.entropy.detach().double(), entropy, rtol=1e-5, atol=1e-6)
    (got.logprob + got.entropy).sum().backward()
    assert gradient_of(leaf).isfinite().all()
    assert gradient_of(leaf)[:, 10:].count_nonzero() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, "rows"])
def test_token_logprob_gradient_equals_fp64_autograd_on_strided_logits(temperature: Any):
    temperature = torch.rand(96) + 0.5 if temperature == "rows" else temperature
    wide = torch.randn(96, 517).requires_grad_()
    targets = torch.randint(500, (96,))
    weights = torch.randn(2, 96)
    got = token_logprob(wide[:, 5:505], targets, temperature=temperature, with_entropy=True)
    assert got.entropy is not None
    (got.logprob * weights[0] + got.entropy * weights[1]).sum().backward()
    truth = wide.detach().double().requires_grad_()
    t = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logprob, entropy = plain(truth[:, 5:505], targets, t)
    (logprob * weights[0] + entropy * weights[1]).sum().backward()
    assert relative(gradient_of(wide), gradient_of(truth)) < HEAD


@pytest.mark.parametrize("use", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("chunk_rows", [None, 50])
def test_linear_logprob_gradients_equal_fp64_autograd(use, chunk_rows):
    p = problem(bias=True)
    temperature = torch.rand(193) + 0.5
    got = linear_logprob(
        p.hidden, p.weight, p.targets, bias=p.bias, temperature=temperature, softcap=4.0, logit_scale=0.9,
        with_entropy=True, chunk_rows=chunk_rows,
    )  # fmt: skip
    leaves = [each.detach().double().requires_grad_() for each in (p.hidden, p.weight, p.bias)]
    z = torch.nn.functional.linear(*leaves) * 0.9
    truth = plain(4.0 * torch.tanh(z / 4.0), p.targets, temperature[:, None])
    weights = torch.randn(2, 193) * torch.tensor([[use != "entropy"], [use != "logprob"]])

    def total(pair):
        if use == "both":
            return (pair[0] * weights[0] + pair[1] * weights[1]).sum()
        return (pair[0] * weights[0]).sum() if use == "logprob" else (pair[1] * weights[1]).sum()

    total(got).backward()
    total(truth).backward()
    torch.testing.assert_close(got.logprob.detach().double(), truth[0].detach(), rtol=1e-5, atol=1e-5)
    for mine, true in zip((p.hidden, p.weight, p.bias), leaves):
        assert relative(mine.grad, true.grad) < HEAD


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",)])
def test_linear_logprob_gives_gradients_only_to_what_is_trained(frozen):
    p = problem(frozen=frozen)
    linear_logprob(p.hidden, p.weight, p.targets).logprob.sum().backward()
    assert (p.hidden.grad is None, p.weight.grad is None) == ("hidden" in frozen, "weight" in frozen)


def test_linear_logprob_without_rows_or_with_one():
    for n in (0, 1):
        p = problem(n=n)
        got = linear_logprob(p.hidden, p.weight, p.targets, with_entropy=True)
        assert got.entropy is not None
        assert got.logprob.shape == got.entropy.shape == (n,)
        got.logprob.sum().backward()
        assert p.weight.grad.shape == p.weight.shape


def test_entropy_is_returned_only_when_asked_for():
    p = problem(n=3)
    assert linear_logprob(p.hidden, p.weight, p.targets).entropy is None
    assert token_logprob(torch.randn(3, 5), torch.tensor([0, 1, 2])).entropy is None


def test_linear_logprob_makes_logits_of_a_chunk_at_a_time_in_forward_and_backward(monkeypatch):
    p, rows, real = problem(h=8), [], Head.logits
    monkeypatch.setattr(Head, "logits", lambda self, hidden: rows.append(len(hidden)) or real(self, hidden))
    linear_logprob(p.hidden, p.weight, p.targets, with_entropy=True, chunk_rows=50).logprob.sum().backward()
    assert rows == [50, 50, 50, 43] * 2


def test_linear_logprob_never_holds_all_logits():
    p = problem(h=8)
    with LargestTensor() as largest:  # which does not see into a custom op
        library.linear_logprob_in_torch(p.hidden, p.weight, p.targets, None, 1.0, 0.0, None, True, 50, None)
    assert 193 < largest.numel <= 50 * 528  # 517 fp32 logits, and the next row on 64 bytes


def test_autocast_and_logits_dtype_choose_the_precision():
    p = problem()
    rounded = torch.nn.functional.linear(p.hidden.bfloat16(), p.weight.bfloat16()).detach()
    exact = (p.hidden.bfloat16().double() @ p.weight.bfloat16().double().T).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = linear_logprob(p.hidden, p.weight, p.targets).logprob
        careful = linear_logprob(p.hidden, p.weight, p.targets, logits_dtype=torch.float32).logprob
        careful.sum().backward()
    torch.testing.assert_close(fast.detach().double(), plain(rounded, p.targets)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(careful.detach().double(), plain(exact, p.targets)[0], rtol=1e-5, atol=1e-5)
    assert p.weight.grad.dtype == p.hidden.grad.dtype == torch.float32


def sample(name, requires_grad):
    """Arguments of a custom op, small, with gradients where asked for."""
    op = next(each for each in default_registry.ops() if each.name == name)
    inputs = op.inputs(op.shapes[2]._replace(N=4), torch.float32, "cpu", "row_scale")
    for differentiable in op.differentiable if requires_grad else ():
        if inputs[differentiable] is not None:
            inputs[differentiable].requires_grad_()
    return inputs


@pytest.mark.parametrize("name", ["row_stats", "row_grad", "token_logprob", "linear_logprob"])
def test_custom_op_passes_opcheck(name):
    arguments = tuple(sample(name, requires_grad=True).values())
    if name == "row_grad":
        order = "logits targets logprob entropy row_max log_sum grad_logprob grad_entropy scale squash row_scale out"
        inputs = sample(name, requires_grad=False)
        arguments = tuple(inputs[each] for each in order.split())
    torch.library.opcheck(getattr(torch.ops.hwgrpo, name).default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_custom_op_that_dequantizes_passes_opcheck(dtype):
    inputs = sample("dequantize_nf4", requires_grad=False)
    arguments = (inputs["packed"], inputs["scales"], inputs["out"].shape, dtype)
    torch.library.opcheck(torch.ops.hwgrpo.dequantize_nf4.default, arguments)


def test_compiled_into_one_graph_they_give_the_same_numbers():
    p = problem(n=20, h=8, v=33)

    def score(hidden, weight):
        linear = linear_logprob(hidden, weight, p.targets, with_entropy=True, temperature=0.7)
        token = token_logprob(hidden @ weight.T, p.targets)
        return torch.stack([each.sum() for each in (*linear, token.logprob) if each is not None]).sum()

    score(p.hidden, p.weight).backward()
    expected = p.weight.grad.clone()
    p.weight.grad = None
    torch.compile(score, backend="aot_eager", fullgraph=True)(p.hidden, p.weight).backward()
    torch.testing.assert_close(p.weight.grad, expected)


def test_chunk_rows_depend_on_vocabulary_dtype_and_device_type_alone():
    assert chunk_rows_for(512, torch.float32, "cpu") == 4096
    assert chunk_rows_for(512, torch.bfloat16, "cpu") == 4096
    assert chunk_rows_for(151936, torch.float32, "cpu") == 64
    assert chunk_rows_for(151936, torch.bfloat16, "cuda") == 4096  # hw: chunk sizes are per device type
    assert chunk_rows_for(151936, torch.float32, "npu") == 2048  # hw: chunk sizes are per device type


def test_chunks_cover_all_rows_and_never_cut_a_sequence_nor_exceed_their_size():
    assert even_chunks(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert even_chunks(0, 4) == []
    assert sequence_chunks([0, 3, 3, 6, 10, 11], 6) == [(0, 3), (3, 5)]
    assert sequence_chunks([0, 3, 3, 6, 10, 11], 5) == [(0, 2), (2, 3), (3, 5)]
    assert sequence_chunks([0, 3, 10], 6) is None


def test_token_logprob_over_several_chunks_keeps_rows_and_temperatures_together():
    logits, targets, temperature = torch.randn(600, 4096), torch.randint(4096, (600,)), torch.rand(600) + 0.5
    assert chunk_rows_for(4096, torch.float32, "cpu") < 600
    got = token_logprob(logits, targets, temperature=temperature).logprob
    expected = plain(logits, targets, temperature[:, None])[0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("name", ["token_logprob", "linear_logprob"])
def test_a_gradient_of_the_gradient_is_refused_and_not_left_out(name, with_entropy):
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    targets = torch.arange(4)
    if name == "token_logprob":
        stats = token_logprob(hidden @ weight.T, targets, with_entropy=with_entropy)
    else:
        stats = linear_logprob(hidden, weight, targets, with_entropy=with_entropy)
    loss = stats.logprob.square().sum() + (stats.entropy.sum() if with_entropy else 0)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"{name} has no second derivative"):
        (gradient.square().sum() + hidden.square().sum()).backward()
