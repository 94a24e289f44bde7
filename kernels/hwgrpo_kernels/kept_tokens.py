"""Rows whose token was drawn from a truncated distribution: drop the same tokens from their logits.

A sampler's filters (top-k, top-p, min-p) keep the tokens whose probability is at least some number. So one number per
row says which: `logprob_floor` [N] fp32, nats under the full distribution; -inf keeps all. The row's target is always
kept. Dropped logits become -inf, which every implementation of the row ops gives probability and gradient 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .argument_checks import check_device, check_tensor, shape_of
from .chunks import even_chunks
from .logit_map import LogitMap

_MASK_BYTES = 2**26
"""Largest mask at once: that of all rows of a chunk would take half as much memory as their logits in 16 bits."""


def check_floor(floor: Tensor | None, source: Tensor, softcap: float | None, other: object) -> None:
    """Raise ValueError for a `logprob_floor` that does not fit the rows of `source`, or options without support."""
    if floor is None:
        return
    check_tensor("logprob_floor", floor)
    if floor.shape != source.shape[:1] or floor.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"logprob_floor must be fp32 [N]=[{source.shape[0]}], got {floor.dtype} {shape_of(floor)}; -inf keeps all "
            "tokens of a row"
        )
    check_device("logprob_floor", floor, "the rows", source)
    if softcap is not None:
        raise ValueError("logprob_floor is unsupported with a softcap, which makes -inf a finite logit; pass None")
    if other is not None:
        raise ValueError("logprob_floor is unsupported with a vocab_group or a reference; pass None")


def drop_tokens(
    logits: Tensor, targets: Tensor, floor: Tensor, mapping: LogitMap, row_stats: Callable[..., tuple[Tensor, ...]]
) -> None:
    """Set the logits of dropped tokens to -inf, in place.

    Args:
        logits: [R,V] raw logits.
        targets: [R], kept in any case.
        floor: [R] log-prob under the full distribution; tokens below it are dropped.
        mapping: of these rows, without a softcap.
        row_stats: the selected implementation.
    """
    assert not mapping.squash, "-inf is no -inf after a softcap"
    _, _, row_max, log_sum = row_stats(logits, targets, *mapping, False)
    factor = mapping.scale if mapping.row_scale_N is None else mapping.scale * mapping.row_scale_N
    # log-prob = factor * (z - max) - log_sum
    lowest = row_max + (floor + log_sum) / factor
    columns = targets.clamp(0, logits.shape[1] - 1)[:, None]
    for a, b in even_chunks(logits.shape[0], max(1, _MASK_BYTES // logits.shape[1])):
        dropped = (logits[a:b] < lowest[a:b, None]).scatter_(1, columns[a:b], False)
        logits[a:b].masked_fill_(dropped, -torch.inf)
