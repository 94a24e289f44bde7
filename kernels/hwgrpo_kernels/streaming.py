"""The streaming driver: chunks of rows through the head and the row kernels, so that [N,V] logits never exist."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import Head, HeadGradients
from .logit_map import LogitMap
from .registry import default_registry

Chunks = Sequence[tuple[int, int]]


class RowKernels(NamedTuple):
    """The implementations of the row ops chosen for one device, logits dtype and vocabulary.

    Args:
        stats, grad: `row_stats` and `row_grad`.
        stats_kl, grad_kl: `row_stats_kl` and `row_grad_kl`, or None where no reference logits are read beside.
    """

    stats: Callable[..., tuple[Tensor, ...]]
    grad: Callable[..., Tensor]
    stats_kl: Callable[..., tuple[Tensor, ...]] | None = None
    grad_kl: Callable[..., Tensor] | None = None


class BesideStats(NamedTuple):
    """What `row_stats_kl` finds besides, for R rows, each [R]."""

    kl: Tensor
    kl_others: Tensor
    ref_logprob: Tensor
    ref_max: Tensor
    ref_log_sum: Tensor


class RowStats(NamedTuple):
    """What `row_stats` returns, for R rows, each [R]; and what is found beside a reference."""

    logprob: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    beside: BesideStats | None = None

    @classmethod
    def of(cls, outputs: Sequence[Tensor]) -> "RowStats":
        """Make it from the outputs of `row_stats` or `row_stats_kl`."""
        stats = cls(outputs[0], outputs[1], outputs[2], outputs[3])
        return stats._replace(beside=BesideStats(*outputs[4:])) if len(outputs) > 4 else stats

    def outputs(self) -> tuple[Tensor, ...]:
        """Return what `of` takes."""
        return (*self[:4], *(self.beside or ()))

    def rows(self, start: int, stop: int) -> "RowStats":
        """Return the statistics of rows [start, stop)."""
        return RowStats.of([each[start:stop] for each in self.outputs()])


class RowGradients(NamedTuple):
    """dL/dlogprob, dL/dentropy and dL/dkl of R rows, each [R]; None means zero."""

    logprob: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def rows(self, start: int, stop: int) -> "RowGradients":
        """Return those of rows [start, stop)."""
        others = (None if each is None else each[start:stop] for each in self[1:])
        return RowGradients(self.logprob[start:stop], *others)


def row_kernels(device_type: str, logits_dtype: torch.dtype, vocab: int, beside: bool = False) -> RowKernels:
    """Resolve the row ops; those that read reference logits only where there are some `beside`."""
    names = ("row_stats", "row_grad", "row_stats_kl", "row_grad_kl")[: 4 if beside else 2]
    chosen = (default_registry.resolve(name, device_type, logits_dtype, vocab) for name in names)
    return RowKernels(*(choice.function for choice in chosen))


def join(parts: list[RowStats], like: Tensor, beside: bool = False) -> RowStats:
    """Concatenate the statistics of consecutive chunks; no chunks give empty tensors in the dtype for `like`."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return RowStats.of([like.new_empty(0, dtype=dtype) for _ in range(9 if beside else 4)])
    return RowStats.of([torch.cat(each) for each in zip(*(part.outputs() for part in parts))])


class Beside(NamedTuple):
    """A second head and its rows, whose logits are read beside those of the first.

    Args:
        head: with a buffer of its own.
        hidden_NH: from `Head.operand`; its H may be another than the first head's.
    """

    head: Head
    hidden_NH: Tensor


class ChunkLogits(NamedTuple):
    """Raw logits [R,V] of a chunk, and those beside them or None; valid until the next chunk's are made."""

    logits: Tensor
    ref_logits: Tensor | None


class Stream:
    """Rows [N,H] and targets [N] against one head.

    Args:
        head: the LM head.
        hidden_NH: from `Head.operand`.
        targets_N: int64.
        mapping: from raw logits to the distribution's.
        kernels: the row ops; resolved from the registry when None.
        beside: the reference, whose logits, under the same mapping, the KL is taken from.
    """

    def __init__(
        self,
        head: Head,
        hidden_NH: Tensor,
        targets_N: Tensor,
        mapping: LogitMap,
        kernels: RowKernels | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.head, self.hidden, self.targets, self.mapping, self.beside = head, hidden_NH, targets_N, mapping, beside
        self.kernels = kernels or row_kernels(
            hidden_NH.device.type, head.logits_dtype, head.vocab, beside=beside is not None
        )

    def expect(self, chunk_rows: int) -> None:
        """Make room for chunks of up to this many rows at the first."""
        rows = min(chunk_rows, self.hidden.shape[0])
        for head in (self.head, *(() if self.beside is None else (self.beside.head,))):
            head.expect(rows)

    def logits_of(self, start: int, stop: int, with_reference: bool = True) -> ChunkLogits:
        """Make the logits of rows [start, stop)."""
        logits = self.head.logits(self.hidden[start:stop])
        if self.beside is None or not with_reference:
            return ChunkLogits(logits, None)
        return ChunkLogits(logits, self.beside.head.logits(self.beside.hidden_NH[start:stop]))

    def stats_of(self, start: int, stop: int, with_entropy: bool) -> tuple[ChunkLogits, RowStats]:
        """Return the logits of rows [start, stop) and their statistics."""
        chunk = self.logits_of(start, stop)
        targets, mapping = self.targets[start:stop], self.mapping.rows(start, stop)
        if chunk.ref_logits is None:
            return chunk, RowStats.of(self.kernels.stats(chunk.logits, targets, *mapping, with_entropy))
        assert self.kernels.stats_kl is not None, "reference logits without the row ops that read them"
        return chunk, RowStats.of(self.kernels.stats_kl(*chunk, targets, *mapping))

    def all_stats(self, chunks: Chunks, with_entropy: bool) -> RowStats:
        """Return the statistics of every row."""
        parts = [self.stats_of(start, stop, with_entropy)[1] for start, stop in chunks]
        return join(parts, self.hidden, beside=self.beside is not None)

    def add_gradients(
        self, gradients: HeadGradients, chunk: ChunkLogits, stats: RowStats, start: int, wanted: RowGradients
    ) -> None:
        """Add the gradient of one chunk, which follows the last one's; its logits may be overwritten.

        Args:
            chunk: logits of rows [start, start+R); its reference is not looked at where `wanted` has no kl.
            stats, wanted: of these rows.
        """
        logits = chunk.logits
        stop = start + logits.shape[0]
        targets, mapping = self.targets[start:stop], self.mapping.rows(start, stop)
        entropy = None if wanted.entropy is None else stats.entropy
        row = targets, stats.logprob, entropy, stats.row_max, stats.log_sum
        out = gradients.out_for(logits)
        if wanted.kl is None:
            dlogits = self.kernels.grad(logits, *row, wanted.logprob, wanted.entropy, *mapping, out)
        else:
            assert self.kernels.grad_kl is not None, "reference logits without the row ops that read them"
            assert stats.beside is not None, "a gradient of a KL without its statistics"
            dlogits = self.kernels.grad_kl(*chunk, *row, *stats.beside, *wanted, *mapping, out)
        gradients.add(dlogits, start)

    def recompute_gradients(
        self, gradients: HeadGradients, chunks: Chunks, stats: RowStats, wanted: RowGradients
    ) -> None:
        """Make the logits again, chunk by chunk, and add their gradients; stats and `wanted` are of all N rows."""
        for start, stop in chunks:
            chunk = self.logits_of(start, stop, with_reference=wanted.kl is not None)
            self.add_gradients(gradients, chunk, stats.rows(start, stop), start, wanted.rows(start, stop))
