"""The sum of squared probabilities of each row, from a chunk's logits and their statistics, for scoring.

It reads the logits once more, in plain torch on every device.
"""

import torch
from torch import Tensor

from .chunks import even_chunks
from .logit_map import LogitMap
from .matrices import accumulated

_BYTES = 2**26
"""Largest fp32 copy of logits at once: a chunk's would take twice as much memory as its logits in 16 bits."""


def check_square_sum(with_square_sum: bool, vocab_group: object) -> None:
    """Raise ValueError for a sum of squares with a sharded head."""
    if with_square_sum and vocab_group is not None:
        raise ValueError("with_square_sum=True is unsupported with a vocab_group; pass None and the full head")


def square_sum(logits: Tensor, row_max: Tensor, log_sum: Tensor, mapping: LogitMap) -> Tensor:
    """Return sum_j p_j^2 of each row, [R] fp32 (fp64 for fp64 logits); 0 for a row of only -inf.

    Args:
        logits: [R,V] raw logits.
        row_max, log_sum: [R], of `row_stats` of the same logits.
        mapping: of these rows.
    """
    dtype = accumulated(logits.dtype)
    factor = logits.new_full((logits.shape[0],), mapping.scale, dtype=dtype)
    if mapping.row_scale_N is not None:
        factor = factor * mapping.row_scale_N.to(dtype)
    sums = torch.empty_like(factor)
    for a, b in even_chunks(logits.shape[0], max(1, _BYTES // (dtype.itemsize * logits.shape[1]))):
        u = logits[a:b]
        if mapping.squash:
            u = (u.to(dtype) * mapping.squash).tanh_()
        centred = torch.sub(u, row_max[a:b, None])  # in the dtype of row_max
        sums[a:b] = centred.mul_(2 * factor[a:b, None]).exp_().sum(1)
    return sums * torch.exp(-2 * log_sum)
