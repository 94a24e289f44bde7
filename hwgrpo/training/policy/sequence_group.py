"""Ranks that share the tokens of their sequences: consecutive ones, as many as `ranks_per_sequence` says.

They exchange heads for tokens in attention (`trainer.sequence_parallel_size`, Ulysses), or each has a part of every
layer's weights (`trainer.tensor_parallel_size`). To everything else of a run each of them is a data-parallel rank like
any other, with prompts of its own. Only for passes of the model do they pool what they have, and go through the same
micro-batches, a part of the tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that this one shares sequences with, itself among them."""

    size: int = 1
    rank: int = 0
    """Its place among them."""
    device_group: Any = None
    """The process group that tensors of the device travel in; None for a rank alone."""
    cpu_group: Any = None
    """The one for values in host memory."""
    tensor: bool = False
    """Layers are cut over them, and see the tokens of all."""

    def gather(self, value: Any) -> list[Any]:
        """Return every member's Python value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over members of a tensor in host memory."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self.cpu_group)
        return total


ALONE = SequenceGroup()


def join(size: int, comm_backend: str, *, tensor: bool = False, timeout: timedelta | None = None) -> SequenceGroup:
    """Return this rank's group; all ranks of the run call it together.

    Args:
        size: ranks of a group; divides those of the run.
        comm_backend: of the device.
        tensor: layers are cut over its ranks.
        timeout: how long a rank waits for the others; None: the library's default.
    """
    if size == 1:
        return ALONE
    device_group, _ = dist.new_subgroups(size, timeout=timeout)
    cpu_group = device_group
    if comm_backend != "gloo":
        cpu_group, _ = dist.new_subgroups(size, backend="gloo", timeout=timeout)
    return SequenceGroup(size, dist.get_rank() % size, device_group, cpu_group, tensor)
