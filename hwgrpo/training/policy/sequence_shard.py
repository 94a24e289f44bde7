"""One rank's part of a micro-batch that a group of ranks goes through: columns of its rows, and some of its losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from hwgrpo.training.policy.micro_batch import MicroBatch, SequenceShard
from hwgrpo.training.policy.sequence_group import SequenceGroup


def share_out(micro: MicroBatch, group: SequenceGroup, *, whole_sequences: bool) -> MicroBatch:
    """Return a rank's part of a micro-batch whose width its group's size divides.

    It is every row's columns [rank * L / S, (rank + 1) * L / S), whoever's sequences stand there, and a run of about
    1/S of the response tokens for head and loss. Mask and branches stay those of whole rows: attention sees these.

    Args:
        micro: laid out alike on all ranks of the group, in host memory.
        group: of this rank; alone, the micro-batch stays as it is.
        whole_sequences: the loss looks at sequences (its scope), so that none is divided.
    """
    S = group.size
    if S == 1:
        return micro
    length = micro.input_ids.shape[1]
    assert length % S == 0, "laid out for another group"
    width = length // S
    mine = slice(group.rank * width, (group.rank + 1) * width)
    total = len(micro.targets)
    column = micro.hidden_rows % length
    holder_N = column // width
    local_N = micro.hidden_rows // length * width + column % width
    taker_N = _takers(micro.cu_seqlens, S, whole_sequences)
    start, stop = (int((taker_N < rank).sum()) for rank in (group.rank, group.rank + 1))
    held = (holder_N == group.rank).nonzero()[:, 0]  # takers ascend, so that they are in the order of receivers
    come_from = holder_N[start:stop]
    arrival = come_from.argsort(stable=True)
    shard = SequenceShard(
        group=group.device_group,
        size=S,
        tensor=group.tensor,
        total=total,
        rows=local_N[held],
        send=tuple(taker_N[held].bincount(minlength=S).tolist()),
        receive=tuple(come_from.bincount(minlength=S).tolist()),
        order=arrival.argsort(),
    )
    return replace(
        micro,
        input_ids=micro.input_ids[:, mine],
        position_ids=micro.position_ids[:, mine],
        is_token=micro.is_token[:, mine],
        hidden_rows=micro.hidden_rows[start:stop],
        targets=micro.targets[start:stop],
        cu_seqlens=(micro.cu_seqlens - start).clamp(0, stop - start),
        token_index=micro.token_index[start:stop],
        signals={name: values[start:stop] for name, values in micro.signals.items()},
        shard=shard,
    )


def _takers(cu_seqlens: torch.Tensor, size: int, whole_sequences: bool) -> torch.Tensor:
    """[N] int64, ascending: the rank that computes the loss of each response token."""
    total = int(cu_seqlens[-1])
    if not whole_sequences:
        return torch.arange(total) * size // max(total, 1)
    middle = cu_seqlens[:-1] + cu_seqlens[1:]  # twice that
    return torch.repeat_interleave((middle * size // max(2 * total, 1)).clamp_max(size - 1), cu_seqlens.diff())
