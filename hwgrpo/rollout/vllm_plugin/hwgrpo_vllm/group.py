"""A process group of a trainer and a server's workers, for weight transfer without a folder.

Both sides run this file. The trainer is rank 0 and opens the store; it sends buckets, each of them many weights in one
tensor of bytes and an index of its content. The group is independent of other groups on either side.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from .checksum import ChecksumError, check, digests

BUCKET_BYTES = 256 << 20
"""Bytes after which a bucket is sent: enough to be fast, little compared to a model. A larger weight has its own."""
ALIGNMENT = 16
"""Alignment of weights in a bucket, in bytes, so that they can be viewed in their dtype."""


class WeightBucket(NamedTuple):
    """Weights packed for a broadcast."""

    contents: bytes
    """JSON: (name, dtype, shape, first byte, checksum) of each weight."""
    body: torch.Tensor
    """The bytes of all weights, [bytes] uint8."""


def communication_library(backend: str) -> str:
    """Return the communication library and its version, which all ranks of a group must share.

    Args:
        backend: torch.distributed's name for it.
    """
    if backend != "nccl":  # hw: the one library that refuses other versions of itself, and has a namesake (RCCL)
        return backend
    version = importlib.import_module("torch.cuda.nccl").version()  # hw: where torch has that library's version
    build = "rccl" if torch.version.hip else backend
    return f"{build} {'.'.join(str(part) for part in version)}"


def connect_store(host: str, port: int, seconds: float) -> dist.Store:
    """Connect a worker to the trainer's store."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


class Group:
    """One rank's side of the group; the constructor returns when all ranks have joined.

    Args:
        store: the store at which the ranks join.
        rank: 0 is the trainer.
        size: number of ranks.
        backend: torch.distributed's name of the communication library.
        name: unique among the groups of all processes.
        patience: timeout in seconds for all ranks to join.
        seconds: timeout of each later operation.
        device: device of the tensors that are broadcast.
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
        # torch has no public call that makes a group of processes without a common default group.
        self._group: Any
        self._group, _ = core._new_process_group_helper(
            size, rank, [], dist.Backend(backend), store, name, timeout=self._timeout
        )
        core._world.pg_group_ranks[self._group] = {each: each for each in range(size)}
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # some libraries connect with the first one
        self._timeout = timedelta(seconds=seconds)

    def arrive(self, stage: str) -> None:
        """Record in the store that this rank has reached a stage."""
        self._store.set(f"{self.name} {stage} {self._rank}", "1")

    def send(self, bucket: WeightBucket) -> None:
        """Send a bucket to all other ranks.

        Raises:
            RuntimeError: another rank has died or timed out.
        """
        self._broadcast(self._tensor([len(bucket.contents), bucket.body.numel()]))
        self._broadcast(torch.frombuffer(bytearray(bucket.contents), dtype=torch.uint8).to(self._device))
        self._broadcast(bucket.body.to(self._device))

    def finish(self) -> None:
        """Signal the end of the transfer to the other ranks."""
        self._broadcast(self._tensor([0, 0]))

    def receive(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that rank 0 sends.

        Args:
            number: number of the transfer.

        Raises:
            ChecksumError: a weight has not arrived as it was sent. No further weight is yielded, but all are received:
                the trainer broadcasts them all the same.
        """
        self.arrive(f"transfer {number}")
        failure: ChecksumError | None = None
        while True:
            lengths = self._tensor([0, 0])
            self._broadcast(lengths)
            described, size = lengths.tolist()
            if not described:
                if failure is not None:
                    raise failure
                return
            contents, body = (torch.empty(n, dtype=torch.uint8, device=self._device) for n in (described, size))
            self._broadcast(contents)
            self._broadcast(body)
            if failure is None:
                try:
                    yield from unpack_bucket(WeightBucket(bytes(contents.tolist()), body))
                except ChecksumError as error:
                    failure = error

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([tensor], options).wait()


def make_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> Iterator[WeightBucket]:
    """Pack weights into buckets.

    Args:
        weights: each may be valid only until the next one is requested.
        dtype: dtype in which floating-point weights are sent.
        device: device of the buckets.
    """
    contents: list[tuple[str, str, list[int], int]] = []
    flats: list[torch.Tensor] = []
    size = 0
    for name, weight in weights:
        sent_dtype = dtype if weight.is_floating_point() else weight.dtype
        # a copy: the weight may be freed or overwritten before the bucket is sent
        flat = weight.detach().to(device, sent_dtype, copy=True).contiguous().reshape(-1).view(torch.uint8)
        if flats and size + flat.numel() > BUCKET_BYTES:
            yield _pack(contents, flats)
            contents, flats, size = [], [], 0
        contents.append((name, str(sent_dtype).removeprefix("torch."), list(weight.shape), size))
        flats.append(flat)
        size += flat.numel() + -flat.numel() % ALIGNMENT
    if flats:
        yield _pack(contents, flats)


def _pack(contents: list[tuple[str, str, list[int], int]], flats: list[torch.Tensor]) -> WeightBucket:
    described = [(*entry, digest) for entry, digest in zip(contents, digests(flats), strict=True)]
    chunks = [chunk for flat in flats for chunk in (flat, flat.new_zeros(-flat.numel() % ALIGNMENT))]
    return WeightBucket(json.dumps(described).encode(), torch.cat(chunks))


def unpack_bucket(bucket: WeightBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a bucket's weights, which share its memory.

    Raises:
        ChecksumError: one of them is not as it was packed; then none is yielded.
    """
    weights: dict[str, torch.Tensor] = {}
    sent: list[str | None] = []
    for name, dtype, shape, start, *checksums in json.loads(bucket.contents):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        weights[name] = bucket.body[start : start + count * kind.itemsize].view(kind).view(shape)
        sent.append(checksums[0] if checksums else None)  # an older trainer sends none
    check([*weights], [*weights.values()], sent)
    yield from weights.items()
