"""Groups of `ranks_per_sequence` consecutive ranks that share the tokens of their sequences.

They exchange heads for tokens in attention (`trainer.sequence_parallel_size`, Ulysses), or each has a shard of every
layer's weights (`trainer.tensor_parallel_size`). Outside the model's passes each is a data-parallel rank with its own
prompts. For passes they gather their sequences and compute the same micro-batches, each some of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share sequences, this rank included."""

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
