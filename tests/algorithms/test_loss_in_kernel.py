"""Every policy loss as the kernels' streaming loss: the gradients of autograd on whole logits."""

from types import SimpleNamespace

import pytest
import torch
from hwgrpo_kernels import linear_token_loss

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from tests.support.numbers.rounding import STEP, assert_values_close

CU = torch.tensor([0, 4, 4, 11, 12, 23])
N, H, V = 23, 8, 31


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate"])
@pytest.mark.parametrize("policy", POLICY_LOSSES.names())
def test_streaming_a_loss_gives_the_gradients_of_whole_logits(policy, correction):
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(N, H, generator=g), 0.5 * torch.randn(V, H, generator=g)
    targets = torch.randint(V, (N,), generator=g)
    now = (hidden @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]
    rows = {
        "advantage": torch.randn(N, generator=g),
        "weight": torch.rand(N, generator=g),
        "selected": (torch.rand(N, generator=g) < 0.5).float(),
        "old_logprob": now + 0.4 * torch.randn(N, generator=g),
        "ref_logprob": now + 0.4 * torch.randn(N, generator=g),
    }
    rows["rollout_logprob"] = rows["old_logprob"] + 0.2 * torch.randn(N, generator=g)
    loss_fn = build_loss(
        AlgorithmConfig(
            loss=LossConfig(policy), kl=KlConfig(coef=0.1), entropy_coef=0.05, correction=CorrectionConfig(correction)
        )
    )

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_token_loss(h, w, targets, loss_fn, rows=rows, scope=loss_fn.scope, cu_seqlens=CU, chunk_rows=5)
    out.loss.backward()

    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = (h64 @ w64.T).log_softmax(1)
    stats = SimpleNamespace(
        logprob=logp.gather(1, targets[:, None])[:, 0], entropy=-(logp.exp() * logp).sum(1), cu_seqlens=CU
    )
    loss, metrics = loss_fn(stats, {name: row.double() for name, row in rows.items()})
    loss.sum().backward()

    assert_values_close(out.loss, loss.sum())
    for streamed, whole in ((h.grad, h64.grad), (w.grad, w64.grad)):
        assert (streamed.double() - whole).norm() < STEP * whole.norm()
    assert set(out.sums) == set(metrics)
    for name, total in out.sums.items():
        torch.testing.assert_close(total.double(), metrics[name].sum().double(), rtol=1e-5, atol=1e-5)
