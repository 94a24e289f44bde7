"""What ranks with parts of one head tell each other before a call: their sizes, and what is wrong on one of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .vocab_parallel import VocabShard

_NUMBERS, _BYTES = 15, 400  # room in one message: sizes, and an error's text


class _Told(NamedTuple):
    numbers: list[int]
    error: str


@contextmanager
def told_to_all_ranks(group: dist.ProcessGroup | None, hidden: object) -> Iterator[None]:
    """Tell the other ranks of an error in the block, for which they would wait forever in `agree` otherwise.

    Args:
        group: the process group; None does nothing.
        hidden: the hidden states, on whose device it is told, if they are a tensor.

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
            _exchange(group, _device_of(hidden), [], None, text)
        raise


def _device_of(hidden: object) -> torch.device:
    if isinstance(hidden, Tensor):
        return hidden.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def agree(
    group: dist.ProcessGroup | None, weight_VH: Tensor, hidden_NH: Tensor, targets_N: Tensor, options: Mapping[str, int]
) -> VocabShard:
    """Return this rank's part of the vocabulary, after one all-gather of sizes (which waits for the device).

    Args:
        group: the process group; None means that this rank has the whole vocabulary, and nobody is asked.
        weight_VH: [V_r,H] this rank's rows of the head.
        hidden_NH: [N,H].
        targets_N: [n] of the n <= N rows that count.
        options: what else must be the same on all ranks, by the name of its argument.

    Raises:
        ValueError: on every rank, if one has other rows or options than rank 0, or refused an argument.
    """
    if group is None:
        return VocabShard([weight_VH.shape[0]], 0, None, torch.device("cpu"))
    same = {"hidden's N": hidden_NH.shape[0], "hidden's H": hidden_NH.shape[1], **options}
    told = _exchange(group, hidden_NH.device, [weight_VH.shape[0], *same.values()], targets_N.sum(), "")
    for rank, each in enumerate(told):
        if each.error:
            raise ValueError(f"rank {rank} of vocab_group was refused: {each.error}")
    for rank, each in enumerate(told):
        for name, value, first in zip([*same, "the sum of targets"], each.numbers[1:], told[0].numbers[1:]):
            if value != first:
                raise ValueError(
                    f"{name} is {value} on rank {rank} of vocab_group, but {first} on rank 0; give all of its ranks "
                    "the same hidden states, targets, rows and options, and each its own rows of weight and bias"
                )
    return VocabShard([each.numbers[0] for each in told], dist.get_rank(group), group, hidden_NH.device)


def _exchange(
    group: dist.ProcessGroup, device: torch.device, numbers: list[int], last: Tensor | None, error: str
) -> list[_Told]:
    """Gather the numbers of every rank, the last one from a tensor on the device, and its error's text."""
    count, text = len(numbers) + (last is not None), list(error.encode()[:_BYTES])
    assert count <= _NUMBERS, "more numbers than the message has room for"
    values = numbers + [0] * (_NUMBERS - len(numbers))
    sent = torch.tensor([count, *values, len(text), *text, *[0] * (_BYTES - len(text))], device=device)
    if last is not None:
        sent[count] = last
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    told = []
    for count, *rest in torch.stack(received).tolist():
        length, *characters = rest[_NUMBERS:]
        told.append(_Told(rest[:count], bytes(characters[:length]).decode(errors="ignore")))
    return told
