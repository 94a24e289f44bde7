"""Checks across the ranks of a vocabulary-parallel head before a call: shard sizes, equal arguments, errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import VocabShard


class _RankReport(NamedTuple):
    """One rank's arguments that must be equal on all ranks and its shard's rows, or its error."""

    same: dict[str, Any]
    size: int = 0
    error: str | None = None


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Send an error in the block to the other ranks, which would hang in `exchange_shards` otherwise.

    Args:
        group: the process group; None does nothing.

    Raises:
        ValueError: `group` is not a process group of this process.
        Exception: the error of the block.
    """
    if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
        raise ValueError(
            f"vocab_group must be a torch.distributed ProcessGroup that this process is in, got {type(group).__name__}"
        )
    try:
        yield
    except Exception as error:
        if group is not None:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            _exchange(group, _RankReport({}, error=text))
        raise


def exchange_shards(
    group: dist.ProcessGroup | None,
    weight_VH: Tensor,
    hidden_NH: Tensor,
    same: Mapping[str, Any],
    same_values: Mapping[str, Tensor],
) -> VocabShard:
    """Exchange shard sizes and check that all ranks pass the same arguments (synchronizes with the device).

    Args:
        group: the process group; None: this rank has the full vocabulary, without communication.
        weight_VH: [V_r,H] this rank's rows of the head.
        hidden_NH: [N,H].
        same: argument name -> value that must be equal on all ranks.
        same_values: argument name -> integers [n] that must be equal; compared by checksum.

    Raises:
        ValueError: on every rank, if one has other rows or options than rank 0, or an invalid argument.
    """
    if group is None:
        return VocabShard([weight_VH.shape[0]], 0, None, torch.device("cpu"))
    sums = {f"a checksum of {name}": _checksum(values) for name, values in same_values.items()}
    mine = {"hidden's N": hidden_NH.shape[0], "hidden's H": hidden_NH.shape[1], **same, **sums}
    reports = _exchange(group, _RankReport(mine, weight_VH.shape[0]))
    for rank, each in enumerate(reports):
        if each.error is not None:
            raise ValueError(f"rank {rank} of vocab_group failed: {each.error}")
    for rank, each in enumerate(reports):
        for name, first in reports[0].same.items():
            if each.same[name] != first:
                raise ValueError(
                    f"{name} is {each.same[name]} on rank {rank} of vocab_group, but {first} on rank 0; give all of "
                    "its ranks the same hidden states, targets, rows and options, and each its own rows of weight and "
                    "bias"
                )
    return VocabShard([each.size for each in reports], dist.get_rank(group), group, hidden_NH.device)


def _checksum(values: Tensor) -> int:
    """Return a number that changes with any value and with their order."""
    positions = torch.arange(1, 1 + values.shape[0], device=values.device)
    return int((values * positions).sum())


def _exchange(group: dist.ProcessGroup, mine: _RankReport) -> list[_RankReport]:
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, mine, group=group)
    return reports
