"""What ranks with parts of one head tell each other before a call: their sizes, and what is wrong on one of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import VocabShard


class _Told(NamedTuple):
    """What one rank says: what must be the same on all, and its rows of the head; or why it cannot go on."""

    same: dict[str, Any]
    size: int = 0
    error: str | None = None


@contextmanager
def told_to_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the other ranks of an error in the block, for which they would wait forever in `agree` otherwise.

    Args:
        group: the process group; None does nothing.

    Raises:
        ValueError: `group` is no process group of this process.
        Exception: what the block raised.
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
            _exchange(group, _Told({}, error=text))
        raise


def agree(
    group: dist.ProcessGroup | None,
    weight_VH: Tensor,
    hidden_NH: Tensor,
    same: Mapping[str, Any],
    same_values: Mapping[str, Tensor],
) -> VocabShard:
    """Return this rank's part of the vocabulary, once all ranks have told their sizes (which waits for the device).

    Args:
        group: the process group; None means that this rank has the whole vocabulary, and nobody is asked.
        weight_VH: [V_r,H] this rank's rows of the head.
        hidden_NH: [N,H].
        same: what must be the same on all ranks, by the name of its argument.
        same_values: integers that must be, each [n]; what is told is a checksum.

    Raises:
        ValueError: on every rank, if one has other rows or options than rank 0, or refused an argument.
    """
    if group is None:
        return VocabShard([weight_VH.shape[0]], 0, None, torch.device("cpu"))
    sums = {f"a checksum of {name}": _checksum(values) for name, values in same_values.items()}
    mine = {"hidden's N": hidden_NH.shape[0], "hidden's H": hidden_NH.shape[1], **same, **sums}
    told = _exchange(group, _Told(mine, weight_VH.shape[0]))
    for rank, each in enumerate(told):
        if each.error is not None:
            raise ValueError(f"rank {rank} of vocab_group was refused: {each.error}")
    for rank, each in enumerate(told):
        for name, first in told[0].same.items():
            if each.same[name] != first:
                raise ValueError(
                    f"{name} is {each.same[name]} on rank {rank} of vocab_group, but {first} on rank 0; give all of "
                    "its ranks the same hidden states, targets, rows and options, and each its own rows of weight and "
                    "bias"
                )
    return VocabShard([each.size for each in told], dist.get_rank(group), group, hidden_NH.device)


def _checksum(values: Tensor) -> int:
    """Return a number that changes with any value and with their order."""
    places = torch.arange(1, 1 + values.shape[0], device=values.device)
    return int((values * places).sum())


def _exchange(group: dist.ProcessGroup, mine: _Told) -> list[_Told]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told
