"""Rows whose target was drawn from a truncated distribution, against fp64 autograd on masked full logits."""

import pytest
import torch
from hwgrpo_kernels import default_registry, linear_logprob, linear_token_loss

from tests.kernels.token_loss_cases import HEAD, ppo, problem, relative

TEMPERATURE = 0.7


def full_logprobs(p, wide=torch.float64):
    logits = p.hidden.to(wide) @ p.weight.to(wide).T
    if p.bias is not None:
        logits = logits + p.bias.to(wide)
    return (logits / TEMPERATURE).log_softmax(-1)


def floors(p):
    """Half way between two neighbours in the order of each row's tokens; some rows keep all, some one, some two tied.

    Returns the floors [N], and the kept tokens [N,V] with each row's target.
    """
    with torch.no_grad():
        full = full_logprobs(p)
        ordered = full.sort(-1, descending=True).values
        n, v = full.shape
        rank = torch.randint(1, v - 2, (n,), generator=torch.Generator().manual_seed(3))
        rank[::7] = 1  # the likeliest token, and the target where it is another
        tied = ordered.gather(1, rank[:, None] - 1) - ordered.gather(1, rank[:, None]) < 1e-9
        rank += tied[:, 0]  # both of them are kept
        floor = (ordered.gather(1, rank[:, None] - 1) + ordered.gather(1, rank[:, None]))[:, 0] / 2
        floor[::5] = -torch.inf
        floor[1::11] = 0.0  # only the target
        kept = (full >= floor[:, None]).scatter(1, p.targets[:, None], True)
    return floor.float(), kept


def expected(p, kept, loss_fn):
    """The loss and its statistics, from a softmax over kept tokens in fp64."""
    full = full_logprobs(p).masked_fill(~kept, -torch.inf).log_softmax(-1)
    logprob = full.gather(1, p.targets[:, None])[:, 0]
    entropy = -(full.exp() * full.masked_fill(~kept, 0.0)).sum(-1)
    stats = type("Stats", (), {"logprob": logprob, "entropy": entropy, "cu_seqlens": None})
    loss, _ = loss_fn(stats, {name: each.double() for name, each in p.rows.items()})
    return loss.sum(), logprob, entropy


def with_ties(p):
    """Give every fourth token of the vocabulary the weights of the one before it."""
    with torch.no_grad():
        p.weight[3::4] = p.weight[2:-1:4][: len(p.weight[3::4])]
    return p


@pytest.mark.parametrize("scope", ["token", "batch"])
@pytest.mark.parametrize("implementation", ["torch", "compiled"])
@pytest.mark.parametrize("ties", [False, True])
def test_loss_and_gradients_are_those_of_masked_logits(scope, implementation, ties):
    p = problem(bias=not ties)
    p = with_ties(p) if ties else p
    p.rows["old"] = torch.full((193,), -3.0)
    floor, kept = floors(p)
    assert kept.sum(-1).min() == 1
    loss, logprob, entropy = expected(p, kept, ppo)
    exact = torch.autograd.grad(loss, [p.hidden, p.weight])
    with default_registry.pinned({"row_stats": implementation, "row_grad": implementation}):
        got = linear_token_loss(
            p.hidden, p.weight, p.targets, ppo, rows=p.rows, bias=p.bias, temperature=TEMPERATURE, scope=scope,
            chunk_rows=50, logprob_floor=floor,
        )  # fmt: skip
    got.loss.backward()
    assert (got.logprob_N - logprob).abs().max() < 1e-5
    assert (got.entropy_N - entropy).abs().max() < 1e-5
    assert abs(got.loss.item() - loss.item()) < 1e-5
    for name, gradient in zip(("hidden", "weight"), exact):
        assert relative(getattr(p, name).grad, gradient) < max(HEAD, 1e-5), name
    alone = kept.sum(-1) == 1
    assert alone.any()
    assert torch.equal(got.logprob_N[alone], torch.zeros(int(alone.sum())))
    assert not p.hidden.grad[alone].any()


def test_masked_rows_have_their_own_floors():
    p = problem()
    floor, kept = floors(p)
    mask = torch.rand(193, generator=torch.Generator().manual_seed(1)) < 0.6
    got = linear_token_loss(
        p.hidden, p.weight, p.targets, ppo, rows=p.rows, temperature=TEMPERATURE, row_mask=mask, logprob_floor=floor
    )
    _, logprob, _ = expected(p, kept, ppo)
    assert (got.logprob_N - logprob)[mask].abs().max() < 1e-5


def test_scores_are_those_of_masked_logits_and_have_no_gradient():
    p = problem(bias=True)
    floor, kept = floors(p)
    options = {"bias": p.bias, "temperature": TEMPERATURE, "with_entropy": True, "logprob_floor": floor}
    with torch.no_grad():
        got = linear_logprob(p.hidden, p.weight, p.targets, chunk_rows=50, **options)
    _, logprob, entropy = expected(p, kept, ppo)
    assert (got.logprob - logprob).abs().max() < 1e-5
    assert (got.entropy - entropy).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"has no gradient: use torch\.no_grad or linear_token_loss"):
        linear_logprob(p.hidden, p.weight, p.targets, **options)


def test_targets_at_both_ends_of_the_vocabulary_are_kept():
    hidden, targets = torch.tensor([[0.0, 5.0, 0.0]] * 2), torch.tensor([0, 2])
    with torch.no_grad():
        logprob = linear_logprob(hidden, torch.eye(3), targets, logprob_floor=torch.full((2,), -1.0)).logprob
    assert logprob.tolist() == pytest.approx([-torch.tensor(5.0).exp().log1p().item()] * 2)


def test_floors_that_keep_everything_change_no_bit():
    p = problem()
    everything = torch.full((193,), -torch.inf)
    losses = [
        linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows, logprob_floor=floor)
        for floor in (None, everything)
    ]
    gradients = [torch.autograd.grad(each.loss, [p.hidden, p.weight]) for each in losses]
    assert torch.equal(losses[0].logprob_N, losses[1].logprob_N)
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"logprob_floor": torch.zeros(5)}, r"logprob_floor must be fp32 \[N\]=\[193\]"),
        ({"logprob_floor": torch.zeros(193), "softcap": 3.0}, "unsupported with a softcap"),
    ],
)
def test_wrong_floors_are_refused(options, error):
    p = problem()
    with pytest.raises(ValueError, match=error):
        linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows, **options)
