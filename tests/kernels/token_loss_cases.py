"""Shared by the tests of linear_token_loss: problems, losses, and the same computation in fp64 on full logits."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hwgrpo_kernels import ReferenceHead
from torch import Tensor

from tests.support.numbers.rounding import bound

HEAD = bound(terms=517, sums=4)
"""Of the loss of a problem: products, softmax over the vocabulary, sums over rows, and products again."""


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in fp64."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def problem(n=193, h=70, v=517, seed=0, dtype=torch.float32, bias=False, frozen=()):
    """Hidden states, head, targets and rows of a PPO-like problem; `frozen` names what needs no gradient."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    p = SimpleNamespace()
    p.hidden = randn(n, h).to(dtype).requires_grad_("hidden" not in frozen)
    p.weight = (randn(v, h) * 0.12).to(dtype).requires_grad_("weight" not in frozen)
    p.bias = randn(v).to(dtype).requires_grad_("bias" not in frozen) if bias else None
    p.reference = None
    p.targets = torch.randint(v, (n,), generator=generator)
    p.rows = {
        "advantage": randn(n),
        "old": randn(n) * 0.1 - 6,
        "ref": randn(n) * 0.1 - 6,
        "weight": torch.full((n,), 1 / max(n, 1)),
    }
    return p


def ppo(stats, rows):
    """Clipped policy gradient, k3 KL and an entropy bonus."""
    ratio = (stats.logprob - rows["old"]).clamp(-20, 20).exp()
    clipped = ratio.clamp(0.8, 1.28)
    policy = -torch.min(ratio * rows["advantage"], clipped * rows["advantage"])
    d = (rows["ref"] - stats.logprob).clamp(-20, 20)
    loss = rows["weight"] * (policy + 0.04 * (d.exp() - d - 1) - 0.01 * stats.entropy)
    return loss, {"clipped": ratio != clipped, "entropy": stats.entropy}


def gspo(stats, rows):
    """Sequence-level ratio: every row of a sequence shares the mean log-ratio of that sequence."""
    cu = stats.cu_seqlens
    lengths = cu.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    log_ratio = (stats.logprob - rows["old"]) * 0.1
    mean = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio) / lengths.clamp(min=1)
    ratio = mean.exp()[sequence]
    policy = -torch.min(ratio * rows["advantage"], ratio.clamp(0.9, 1.1) * rows["advantage"])
    return rows["weight"] * policy, {"ratio": ratio}


def centred(stats, rows):
    """A loss that needs the whole batch: log-probs relative to the batch mean, weighted by their rank."""
    gap = stats.logprob - stats.logprob.mean()
    return rows["weight"] * rows["advantage"] * gap * (gap > gap.detach().median()), {"squared_gap": gap**2}


def with_reference(p, h=None, near=False, bias=False):
    """Give a problem a reference, of its own width, or near the policy with its very head."""
    generator = torch.Generator().manual_seed(7)
    n, v, dtype = p.hidden.shape[0], p.weight.shape[0], p.hidden.dtype
    if near:
        noise = 0.01 * torch.randn(p.hidden.shape, generator=generator)
        p.reference = ReferenceHead(p.hidden.detach() + noise, p.weight)
        return p
    h = h or p.hidden.shape[1]
    hidden, weight, offsets = (torch.randn(*size, generator=generator).to(dtype) for size in ((n, h), (v, h), (v,)))
    p.reference = ReferenceHead(hidden, weight * 0.12, offsets if bias else None)
    return p


def full_kl(stats, rows):
    """A policy gradient with the KL over the whole vocabulary and an entropy bonus."""
    loss = rows["weight"] * (-rows["advantage"] * stats.logprob + 0.3 * stats.full_kl - 0.01 * stats.entropy)
    return loss, {"kl": stats.full_kl, "k1": stats.logprob - stats.ref_logprob}


def in_fp64(p, loss_fn, mask=None, cu_seqlens=None, temperature=1.0, softcap=None, logit_scale=1.0):
    """The loss, its sums and its gradients (hidden, weight, bias) by autograd in fp64 on [N,V] logits."""
    leaves = [
        None if each is None else each.detach().double().requires_grad_() for each in (p.hidden, p.weight, p.bias)
    ]
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None

    def logits_of(hidden, weight, bias):
        z = hidden @ weight.T
        if bias is not None:
            z = z + bias
        z = z * logit_scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        return z / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)

    z = logits_of(hidden, weight, bias)
    live = torch.arange(z.shape[0]) if mask is None else mask.nonzero()[:, 0]
    z, targets = z[live], p.targets[live]
    rows = {name: each[live].double() for name, each in p.rows.items()}
    if cu_seqlens is not None and mask is not None:
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), mask.long().cumsum(0)])[cu_seqlens]
    logprobs = z.log_softmax(1)
    stats = SimpleNamespace(
        logprob=logprobs.gather(1, targets[:, None])[:, 0],
        entropy=-(logprobs.exp() * logprobs).sum(1),
        cu_seqlens=cu_seqlens,
    )
    if p.reference is not None:
        beside = (None if each is None else each.detach().double() for each in p.reference)
        ref_logprobs = logits_of(*beside)[live].log_softmax(1)
        stats.full_kl = F.kl_div(ref_logprobs, logprobs, reduction="none", log_target=True).sum(1)
        stats.ref_logprob = ref_logprobs.gather(1, targets[:, None])[:, 0]
    losses, metrics = loss_fn(stats, rows)
    loss = losses.sum()
    loss.backward()
    sums = {name: each.detach().double().sum() for name, each in metrics.items()}
    return SimpleNamespace(
        loss=loss.detach(),
        sums=sums,
        logprob=stats.logprob.detach(),
        entropy=stats.entropy.detach(),
        kl=stats.full_kl.detach() if p.reference is not None else None,
        grads=[None if each is None else each.grad for each in leaves],
    )
