"""A process group of a trainer and a server's workers, through which weights go with no folder in between.

Both sides run this file. The trainer is rank 0 and waits at a store of its own; it sends parcels, each of them many
weights in one tensor of bytes and a list of what is where in it. The group stands beside those that either side has.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

PARCEL_BYTES = 256 << 20
"""Bytes after which a parcel is sent: enough to be fast, little beside a model. A larger weight has its own."""
ALIGNMENT = 16
"""Bytes at whose multiples weights begin in a parcel, so that they can be read as what they are."""


class Parcel(NamedTuple):
    """Weights on their way."""

    contents: bytes
    """JSON: (name, dtype, shape, first byte) of each."""
    body: torch.Tensor
    """The bytes of all of them."""


def library(backend: str) -> str:
    """Return what two processes must have alike to be in one group: the communication library and its version.

    Args:
        backend: torch.distributed's name for it.
    """
    if backend != "nccl":  # hw: the one library that refuses other versions of itself, and has a namesake (RCCL)
        return backend
    version = importlib.import_module("torch.cuda.nccl").version()
    build = "rccl" if torch.version.hip else backend
    return f"{build} {'.'.join(str(part) for part in version)}"


def meeting_point(host: str, port: int, seconds: float) -> dist.Store:
    """Return the trainer's store as a worker sees it."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


class Group:
    """One side of a group; it is made when all sides are there.

    Args:
        store: where they meet.
        rank: 0 is the trainer.
        size: ranks.
        backend: torch.distributed's name of the communication library.
        name: no other group of either process has it.
        patience: seconds in which all must have come.
        seconds: that the others may take for anything later.
        device: of the tensors that the library moves.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        size: int,
        backend: str,
        name: str,
        patience: float,
        seconds: float,
        device: torch.device,
    ) -> None:
        self.name = name
        self._store, self._rank, self._size, self._device = store, rank, size, device
        self._timeout = timedelta(seconds=patience)
        self.arrive("here")
        core: Any = dist.distributed_c10d
        # torch offers no call that makes a group of processes which have no group in common already.
        self._group: Any
        self._group, _ = core._new_process_group_helper(
            size, rank, [], dist.Backend(backend), store, name, timeout=self._timeout
        )
        core._world.pg_group_ranks[self._group] = {each: each for each in range(size)}
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # some libraries connect with the first one
        self._timeout = timedelta(seconds=seconds)

    def arrive(self, stage: str) -> None:
        """Let the others know that this rank has come to a stage."""
        self._store.set(f"{self.name} {stage} {self._rank}", "1")

    def send(self, parcel: Parcel) -> None:
        """Send a parcel to all other ranks.

        Raises:
            RuntimeError: another rank is gone, or takes too long.
        """
        self._broadcast(self._tensor([len(parcel.contents), parcel.body.numel()]))
        self._broadcast(torch.frombuffer(bytearray(parcel.contents), dtype=torch.uint8).to(self._device))
        self._broadcast(parcel.body.to(self._device))

    def finish(self) -> None:
        """Tell the other ranks that this was all."""
        self._broadcast(self._tensor([0, 0]))

    def received(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that rank 0 sends.

        Args:
            number: of the transfer.
        """
        self.arrive(f"transfer {number}")
        while True:
            lengths = self._tensor([0, 0])
            self._broadcast(lengths)
            described, size = lengths.tolist()
            if not described:
                return
            contents, body = (torch.empty(n, dtype=torch.uint8, device=self._device) for n in (described, size))
            self._broadcast(contents)
            self._broadcast(body)
            yield from unpacked(Parcel(bytes(contents.tolist()), body))

    def close(self) -> None:
        """Leave it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([tensor], options).wait()


def parcels(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device) -> Iterator[Parcel]:
    """Put weights into parcels.

    Args:
        weights: each may live only until the next one is asked for.
        dtype: dtype that floating-point weights travel in.
        device: where the parcels are.
    """
    contents: list[tuple[str, str, list[int], int]] = []
    pieces: list[torch.Tensor] = []
    size = 0
    for name, weight in weights:
        wanted = dtype if weight.is_floating_point() else weight.dtype
        # a copy: the weight may be gone, or another, when the parcel is sent
        flat = weight.detach().to(device, wanted, copy=True).contiguous().reshape(-1).view(torch.uint8)
        if pieces and size + flat.numel() > PARCEL_BYTES:
            yield Parcel(json.dumps(contents).encode(), torch.cat(pieces))
            contents, pieces, size = [], [], 0
        contents.append((name, str(wanted).removeprefix("torch."), list(weight.shape), size))
        pieces += [flat, flat.new_zeros(-flat.numel() % ALIGNMENT)]
        size += flat.numel() + pieces[-1].numel()
    if pieces:
        yield Parcel(json.dumps(contents).encode(), torch.cat(pieces))


def unpacked(parcel: Parcel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parcel's weights, which share its memory."""
    for name, dtype, shape, start in json.loads(parcel.contents):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        flat = parcel.body[start : start + count * kind.itemsize].view(kind)
        yield name, flat.view(shape)
