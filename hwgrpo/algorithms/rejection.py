"""Which tokens and sequences a rollout correction leaves out for the gap between rollout engine and trainer.

Names and bounds are verl's `rollout_rs`. With x = old_logprob - rollout_logprob of a token the statistics are
k1 = -x, k2 = x^2 / 2 and k3 = e^x - 1 - x, of each token, or summed, averaged or the largest over its sequence. A
`veto` leaves out a sequence in which the trainer's probability of a token is below that share of the engine's (slime's
`rs_veto_threshold`). Which there are and what bounds they take stands in `hwgrpo/config/rollout_rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hwgrpo.algorithms.scope import Scope, sequence_sum
from hwgrpo.catalog import SAFE_LOG_RATIO

STATISTICS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: x.expm1() - x,
}


def rejection_scope(reject: Mapping[str, Any]) -> Scope:
    """Return which rows `kept` must see at once."""
    return "token" if all(name.startswith("token_") for name in reject) else "sequence"


def kept(log_ratio_N: torch.Tensor, reject: Mapping[str, Any], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for the rows that every statistic is within its bounds for, else 0.

    Args:
        log_ratio_N: [N] old_logprob - rollout_logprob.
        reject: statistic -> its bounds, which have been checked.
        cu_seqlens: [S + 1] row bounds of the sequences; not read where the scope is `token`.

    Returns:
        [N], of the dtype of the log-ratios.
    """
    x = log_ratio_N.clamp(-SAFE_LOG_RATIO, SAFE_LOG_RATIO)
    found = torch.ones_like(x, dtype=torch.bool)
    for name, bounds in reject.items():
        if name == "veto":
            # of the log-ratio itself: the clamp would end at a share of e^-20
            found &= _over_sequences("seq_max", -log_ratio_N, cu_seqlens) <= -math.log(bounds)
            continue
        over, _, k = name.rpartition("_")
        values = STATISTICS[k](x)
        if over != "token":
            values = _over_sequences(over, values, cu_seqlens)
        if k == "k1":
            found &= (values >= math.log(bounds[0])) & (values <= math.log(bounds[1]))
        else:
            found &= values <= bounds
    return found.to(x.dtype)


def _over_sequences(over: str, values_N: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return [N] the sum, mean or maximum over each row's sequence."""
    assert cu_seqlens is not None, "a statistic of sequences needs their row bounds"
    sum_S, sequence_N = sequence_sum(values_N, cu_seqlens)
    if over == "seq_max":
        lowest_S = torch.full_like(sum_S, float("-inf"))
        return lowest_S.scatter_reduce(0, sequence_N, values_N, "amax")[sequence_N]
    if over == "seq_mean":
        sum_S = sum_S / cu_seqlens.diff().clamp(min=1)
    return sum_S[sequence_N]
