"""token_logprob(inplace_backward=True): the same gradients in the memory of the logits, or a clear refusal."""

import pytest
import torch
from hwgrpo_kernels import token_logprob

N, V = 12, 517
MODIFIED = "modified by an inplace operation"  # torch's own words


def head(dtype=torch.float32, rows=N, vocab=V):
    """Hidden states, a head and targets; logits of them are nobody's leaf."""
    hidden = torch.randn(rows, 16).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,))


def padded(logits):
    """The same logits as rows of a wider matrix, with the wider one."""
    wide = torch.nn.functional.pad(logits, (0, 3), value=7.0)
    return wide[:, : logits.shape[1]], wide


def total(got, use):
    weights = torch.linspace(-1, 2, N)
    logprob = 0 if use == "entropy" else (got.logprob * weights).sum()
    return logprob if use == "logprob" else logprob + (got.entropy * weights.flip(0)).sum()


@pytest.mark.parametrize("use", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["dense", "padded"])
def test_values_and_gradients_are_those_of_a_backward_that_is_not_in_place(layout, dtype, use):
    hidden, weight, targets = head(dtype)
    temperature = torch.rand(N) + 0.5
    results = []
    for inplace in (False, True):
        hidden.grad = weight.grad = None
        logits = hidden @ weight.T
        if layout == "padded":
            logits, _ = padded(logits)
        got = token_logprob(logits, targets, temperature=temperature, with_entropy=True, inplace_backward=inplace)
        assert got.entropy is not None
        total(got, use).backward()
        results.append([got.logprob.detach(), got.entropy.detach(), hidden.grad, weight.grad])
    assert all(each.count_nonzero() for each in results[0])
    exactly = {"rtol": 0, "atol": 0} if hidden.device.type == "cpu" else {}  # elsewhere a layout can choose the GEMM
    for plain, mine in zip(*results):
        torch.testing.assert_close(mine, plain, **exactly)


def test_the_logits_are_untouched_until_backward_and_are_their_gradient_after_it():
    hidden, weight, targets = head()
    logits, wide = padded(hidden @ weight.T)
    before = wide.detach().clone()
    handed_on = []
    logits.register_hook(lambda gradient: handed_on.append(gradient.data_ptr()))
    got = token_logprob(logits, targets, inplace_backward=True)
    assert got.entropy is None
    assert torch.equal(wide, before)
    got.logprob.sum().backward()
    assert handed_on == [logits.data_ptr()]
    probabilities = before[:, :V].softmax(1)
    torch.testing.assert_close(logits.detach(), torch.nn.functional.one_hot(targets, V) - probabilities)
    assert (wide[:, V:] == 7).all()


def largest_allocation(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return max(event.cpu_memory_usage for event in profile.events())


def test_backward_allocates_no_logits_of_all_rows():
    hidden, weight, targets = head(rows=64, vocab=20000)  # more than one block of rows
    nbytes = 64 * 20000 * 4
    largest = {}
    for inplace in (False, True):
        logits = hidden @ weight.T
        loss = token_logprob(logits, targets, with_entropy=True, inplace_backward=inplace).logprob.sum()
        largest[inplace] = largest_allocation(lambda loss=loss, logits=logits: torch.autograd.grad(loss, logits))
    assert largest[False] >= nbytes
    assert 0 < largest[True] <= nbytes / 2  # a block of rows


LEAF = torch.zeros(N, V, requires_grad=True)


@pytest.mark.parametrize(
    "logits,reason",
    [
        (torch.zeros(N, V), "do not require grad"),
        (LEAF, "are a leaf"),
        (LEAF[:, :100], "are a view of a leaf"),
        ((LEAF * 1).T.contiguous().T, r"have strides \[1, 12\]"),
        ((LEAF * 1)[:, ::2], r"have strides \[517, 2\]"),
        ((LEAF[:1] * 1).expand(N, V), r"have strides \[0, 1\]"),
        ((LEAF.flatten() * 1).as_strided((N, V), (V - 1, 1)), r"have strides \[516, 1\]"),
    ],
    ids=["no_grad", "leaf", "view_of_leaf", "transposed", "every_other", "expanded", "overlapping"],
)
def test_logits_that_cannot_hold_their_gradient_are_refused(logits, reason):
    targets = torch.zeros(N, dtype=torch.int64)
    token_logprob(logits, targets)
    with pytest.raises(ValueError, match=f"{reason}.*leave inplace_backward out"):
        token_logprob(logits, targets, inplace_backward=True)


@pytest.mark.parametrize("logits", [torch.zeros(N, V), LEAF], ids=["no_grad", "leaf"])
def test_where_no_gradient_is_made_nothing_is_refused(logits):
    with torch.no_grad():
        got = token_logprob(logits, torch.zeros(N, dtype=torch.int64), inplace_backward=True)
    torch.testing.assert_close(got.logprob, torch.full((N,), -torch.log(torch.tensor(float(V)))))


@pytest.mark.parametrize("retain_graph", [True, False])
def test_a_second_backward_is_refused(retain_graph):
    hidden, weight, targets = head()
    loss = token_logprob(hidden @ weight.T, targets, inplace_backward=True).logprob.sum()
    loss.backward(retain_graph=retain_graph)
    kept = weight.grad.clone()
    with pytest.raises(RuntimeError, match="a second is impossible; leave inplace_backward out"):
        loss.backward()
    assert torch.equal(weight.grad, kept)


def test_a_gradient_of_the_gradient_is_refused():
    hidden, weight, targets = head()
    logits = hidden @ weight.T
    loss = token_logprob(logits, targets, inplace_backward=True).logprob.square().sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_who_has_used_the_logits_before_they_go_gets_the_sum_of_gradients():
    hidden, weight, targets = head()
    logits = hidden @ weight.T
    ours = token_logprob(logits, targets, inplace_backward=True).logprob
    (ours.sum() + logits.logsumexp(1).square().sum()).backward()  # made later, so its backward comes first
    truth = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = truth[0] @ truth[1].T
    logprob = logits.log_softmax(1).gather(1, targets[:, None])
    (logprob.sum() + logits.logsumexp(1).square().sum()).backward()
    for mine, true in zip((hidden, weight), truth):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs_them", ["a later backward", "their maker", "the same again", "another view"])
def test_who_needs_the_logits_after_they_are_gone_gets_torchs_error(needs_them):
    hidden, weight, targets = head()
    logits = hidden @ weight.T
    other = torch.zeros(())
    if needs_them == "their maker":
        logits = torch.tanh(logits)
    if needs_them == "a later backward":
        other = logits.logsumexp(1).sum()
    if needs_them == "another view":
        other = logits[:, :5].square().sum()
    if needs_them == "the same again":
        other = token_logprob(logits, targets, inplace_backward=True).logprob.sum()
    ours = token_logprob(logits, targets, inplace_backward=True).logprob.sum()
    with pytest.raises(RuntimeError, match=MODIFIED):
        (other + ours).backward()


def test_inside_a_compiled_region_it_is_refused():
    hidden, weight, targets = head()

    def score(hidden):
        return token_logprob(hidden @ weight.T, targets, inplace_backward=True).logprob.sum()

    with pytest.raises(Exception, match="token_logprob with inplace_backward is eager"):
        torch.compile(score, backend="eager", fullgraph=True)(hidden)


def test_targets_out_of_range_and_no_rows_are_as_without_it():
    hidden, weight, targets = head()
    with pytest.raises(ValueError, match="targets contains 517"):
        token_logprob(hidden @ weight.T, targets.fill_(V), inplace_backward=True)
    hidden, weight, targets = head(rows=0)
    token_logprob(hidden @ weight.T, targets, inplace_backward=True).logprob.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 16)
