"""Ranks that share the tokens of their sequences, and one rank's shard of such a micro-batch: columns, some losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hwgrpo.training.policy.micro_batch import MicroBatch, SequenceShard


def shard_micro_batch(micro: MicroBatch, group: SequenceGroup, *, full_sequences: bool) -> MicroBatch:
    """Return this rank's shard of a micro-batch; the group's size divides its width.

    It has the columns [rank * L / S, (rank + 1) * L / S) of every row, whichever sequences are there, and about 1/S of
    the response tokens for head and loss. Mask and branches cover full rows: attention sees those.

    Args:
        micro: the same micro-batch on all ranks of the group, in host memory.
        group: this rank's group; for a single rank, the micro-batch is returned unchanged.
        full_sequences: do not split sequences, because the loss has sequence scope.
    """
    S = group.size
    if S == 1:
        return micro
    length = micro.input_ids.shape[1]
    assert length % S == 0, "built for another group"
    width = length // S
    mine = slice(group.rank * width, (group.rank + 1) * width)
    total = len(micro.targets)
    column = micro.hidden_rows % length
    holder_N = column // width
    local_N = micro.hidden_rows // length * width + column % width
    loss_rank_N = _loss_ranks(micro.cu_seqlens, S, full_sequences)
    start, stop = (int((loss_rank_N < rank).sum()) for rank in (group.rank, group.rank + 1))
    held = (holder_N == group.rank).nonzero()[:, 0]  # loss ranks ascend: this is the order of receivers
    senders = holder_N[start:stop]
    arrival = senders.argsort(stable=True)
    shard = SequenceShard(
        group=group.device_group,
        size=S,
        tensor=group.tensor,
        total=total,
        rows=local_N[held],
        send=tuple(loss_rank_N[held].bincount(minlength=S).tolist()),
        receive=tuple(senders.bincount(minlength=S).tolist()),
        order=arrival.argsort(),
    )
    return replace(
        micro,
        input_ids=micro.input_ids[:, mine],
        position_ids=micro.position_ids[..., mine],
        is_token=micro.is_token[:, mine],
        hidden_rows=micro.hidden_rows[start:stop],
        targets=micro.targets[start:stop],
        cu_seqlens=(micro.cu_seqlens - start).clamp(0, stop - start),
        token_index=micro.token_index[start:stop],
        signals={name: values[start:stop] for name, values in micro.signals.items()},
        shard=shard,
    )


def _loss_ranks(cu_seqlens: torch.Tensor, size: int, full_sequences: bool) -> torch.Tensor:
    """Return [N] int64, ascending: the rank that computes the loss of each response token."""
    total = int(cu_seqlens[-1])
    if not full_sequences:
        return torch.arange(total) * size // max(total, 1)
    middle = cu_seqlens[:-1] + cu_seqlens[1:]  # twice the middle
    return torch.repeat_interleave((middle * size // max(2 * total, 1)).clamp_max(size - 1), cu_seqlens.diff())


@dataclass(frozen=True)
class SequenceGroup:
    """`ranks_per_sequence` consecutive ranks that share the tokens of their sequences, this rank included.

    They exchange heads for tokens in attention (`trainer.sequence_parallel_size`, Ulysses), or each has a shard of
    every layer's weights (`trainer.tensor_parallel_size`). Outside the model's passes each is a data-parallel rank with
    its own prompts. For passes they gather their sequences and compute the same micro-batches, each some of the tokens.
    """

    size: int = 1
    rank: int = 0
    """This rank's index in the group."""
    device_group: Any = None
    """Process group for tensors on the device; None for a single rank."""
    cpu_group: Any = None
    """Process group for values in host memory."""
    tensor: bool = False
    """Tensor parallelism: layers are sharded over the ranks and see the tokens of all."""

    def gather(self, value: Any) -> list[Any]:
        """Return every member's Python value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor in host memory over the members."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self.cpu_group)
        return total


SINGLE_RANK = SequenceGroup()


def join_sequence_group(
    size: int, comm_backend: str, *, tensor: bool = False, timeout: timedelta | None = None
) -> SequenceGroup:
    """Return this rank's group; all ranks of the run call it together.

    Args:
        size: ranks of a group; divides the number of ranks.
        comm_backend: the device's backend.
        tensor: tensor parallelism instead of sequence parallelism.
        timeout: longest wait of a rank for the others; None: torch's default.
    """
    if size == 1:
        return SINGLE_RANK
    device_group, _ = dist.new_subgroups(size, timeout=timeout)
    cpu_group = device_group
    if comm_backend != "gloo":
        cpu_group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
    return SequenceGroup(size, dist.get_rank() % size, device_group, cpu_group, tensor)
