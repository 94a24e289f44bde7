"""One rank's part of a micro-batch that a group of ranks goes through: columns of its rows, and some of its losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hwgrpo.models.ulysses_attention import all_to_all
from hwgrpo.training.policy.sequence_group import SequenceGroup

if TYPE_CHECKING:
    from hwgrpo.training.policy.micro_batch import MicroBatch


@dataclass(frozen=True)
class SequenceShard:
    """How a rank's [B * L / S] hidden states, its columns of all rows, become those that its own losses read."""

    group: Any
    """The process group."""
    size: int
    """S, its ranks."""
    tensor: bool
    """Layers are cut over them, and gather the tokens of all by themselves."""
    total: int
    """Response tokens of the micro-batch, over all ranks of the group."""
    rows: torch.Tensor
    """[M] int64: which hidden states go to other ranks or stay, in the order of receivers."""
    send: tuple[int, ...]
    """How many go to each rank; M in all."""
    receive: tuple[int, ...]
    """How many come from each rank; N in all."""
    order: torch.Tensor
    """[N] int64: where the hidden state of each of this rank's response tokens is among those that came."""

    def to(self, device: torch.device) -> SequenceShard:
        """Return the same on `device`."""
        return replace(self, rows=self.rows.to(device), order=self.order.to(device))

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [N, H], what predicts this rank's response tokens, of all ranks' [B * L / S, H]."""
        return all_to_all(hidden[self.rows], self.send, self.receive, self.group)[self.order]


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
