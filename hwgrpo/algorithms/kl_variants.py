"""The KL per token besides k3: k1, |x|, k2, those with the gradient of k2, and the exact one; see `kl.py`."""

from __future__ import annotations

import torch

from hwgrpo.algorithms.kl import k3


def k1(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """-x: unbiased value, but as a loss its gradient is zero in expectation; use `k1+` or `k2` to regularise."""
    return logprob_N - ref_logprob_N


def absolute(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """|x|."""
    return (logprob_N - ref_logprob_N).abs()


def k2(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: its expected gradient is that of KL(policy || reference)."""
    return (logprob_N - ref_logprob_N).square() * 0.5


def k1_plus(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """The value of k1 with the gradient of k2, in expectation that of KL(policy || reference)."""
    return _straight_through(k1(logprob_N, ref_logprob_N), logprob_N, ref_logprob_N)


def k3_plus(
    logprob_N: torch.Tensor,
    ref_logprob_N: torch.Tensor,
    *,
    input_clamp: float | None,
    output_clamp: float | None,
) -> torch.Tensor:
    """The value of k3 with the gradient of k2, which no clamp cuts off."""
    value_N = k3(logprob_N.detach(), ref_logprob_N, input_clamp=input_clamp, output_clamp=output_clamp)
    return _straight_through(value_N, logprob_N, ref_logprob_N)


def exact(full_kl_N: torch.Tensor) -> torch.Tensor:
    """sum over the vocabulary of p (log p - log p_ref), which the kernels compute with its gradient.

    Args:
        full_kl_N: [N] `TokenStats.full_kl`.
    """
    return full_kl_N


def _straight_through(value_N: torch.Tensor, logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """Return `value_N` with the gradient (logprob - ref_logprob) d logprob.

    The zero that carries the gradient is a product, not `k2 - k2.detach()`: adding a large k2 to a small value and
    taking it away again would round the value.
    """
    slope_N = (logprob_N - ref_logprob_N).detach()
    return value_N.detach() + slope_N * (logprob_N - logprob_N.detach())
