"""Leaving out responses that the policy has moved away from."""

from __future__ import annotations

import torch

from hwgrpo.algorithms.scope import sequence_sum


def on_policy_enough(
    log_ratio_N: torch.Tensor, advantage_N: torch.Tensor, threshold: float, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return 1 where a row is kept: A >= 0, or the mean log-ratio of its sequence is at most the threshold; else 0.

    Source: DeepSeek-V3.2 (2025), equation 9, as in TRL.

    Args:
        log_ratio_N: [N] rollout_logprob - logprob, without gradient: its mean estimates KL(rollout || policy).
        advantage_N: [N].
        threshold: nats per token.
        cu_seqlens: [S + 1] row bounds of the sequences.

    Returns:
        [N], of the dtype of the log-ratios.
    """
    assert cu_seqlens is not None, "the off-policy sequence mask needs the row bounds of the sequences"
    sum_S, sequence_N = sequence_sum(log_ratio_N, cu_seqlens)
    mean_N = (sum_S / cu_seqlens.diff().clamp(min=1))[sequence_N]
    return ((advantage_N >= 0) | (mean_N <= threshold)).to(log_ratio_N.dtype)
