"""Stream chunks of rows through the head and the row kernels, so that [N,V] logits never exist."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import Head, HeadGradients
from .kept_tokens import drop_tokens
from .logit_map import LogitMap
from .registry import default_registry

Chunks = Sequence[tuple[int, int]]


class RowKernels(NamedTuple):
    """The row op implementations selected for one device, logits dtype and vocabulary.

    Args:
        stats, grad: `row_stats` and `row_grad`.
        stats_kl, grad_kl: `row_stats_kl` and `row_grad_kl`; None without reference logits.
    """

    stats: Callable[..., tuple[Tensor, ...]]
    grad: Callable[..., Tensor]
    stats_kl: Callable[..., tuple[Tensor, ...]] | None = None
    grad_kl: Callable[..., Tensor] | None = None


class ReferenceStats(NamedTuple):
    """The further outputs of `row_stats_kl` for R rows, each [R]."""

    kl: Tensor
    kl_others: Tensor
    ref_logprob: Tensor
    ref_max: Tensor
    ref_log_sum: Tensor


class RowStats(NamedTuple):
    """The outputs of `row_stats` for R rows, each [R], and those with a reference."""

    logprob: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    reference: ReferenceStats | None = None

    @classmethod
    def from_outputs(cls, outputs: Sequence[Tensor]) -> "RowStats":
        """Build from the outputs of `row_stats` or `row_stats_kl`."""
        stats = cls(outputs[0], outputs[1], outputs[2], outputs[3])
        return stats._replace(reference=ReferenceStats(*outputs[4:])) if len(outputs) > 4 else stats

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the statistics as `from_outputs` accepts them."""
        return (*self[:4], *(self.reference or ()))

    def rows(self, start: int, stop: int) -> "RowStats":
        """Return the statistics of rows [start, stop)."""
        return RowStats.from_outputs([each[start:stop] for each in self.outputs()])


class RowGradients(NamedTuple):
    """dL/dlogprob, dL/dentropy and dL/dkl of R rows, each [R]; None means zero."""

    logprob: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def rows(self, start: int, stop: int) -> "RowGradients":
        """Return the gradients of rows [start, stop)."""
        others = (None if each is None else each[start:stop] for each in self[1:])
        return RowGradients(self.logprob[start:stop], *others)


def row_kernels(device_type: str, logits_dtype: torch.dtype, vocab: int, with_reference: bool = False) -> RowKernels:
    """Resolve the row ops; those that read reference logits only if `with_reference`."""
    names = ("row_stats", "row_grad", "row_stats_kl", "row_grad_kl")[: 4 if with_reference else 2]
    choices = (default_registry.resolve(name, device_type, logits_dtype, vocab) for name in names)
    return RowKernels(*(choice.function for choice in choices))


def concatenate(chunks: list[RowStats], like: Tensor, with_reference: bool = False) -> RowStats:
    """Concatenate the statistics of consecutive chunks; without chunks, empty tensors in the dtype for `like`."""
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return RowStats.from_outputs([like.new_empty(0, dtype=dtype) for _ in range(9 if with_reference else 4)])
    return RowStats.from_outputs([torch.cat(each) for each in zip(*(chunk.outputs() for chunk in chunks))])


class ReferenceRows(NamedTuple):
    """The reference's head and hidden states.

    Args:
        head: has its own logits buffer.
        hidden_NH: from `Head.operand`; its H may differ from the policy's.
    """

    head: Head
    hidden_NH: Tensor


class ChunkLogits(NamedTuple):
    """Raw logits [R,V] of a chunk, and the reference's or None; valid until the next chunk is computed."""

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
        reference: for the KL divergence from its distribution under the same mapping; None without.
        floor_N: log-prob below which a row's tokens are dropped (`kept_tokens`); None keeps all.
    """

    def __init__(
        self,
        head: Head,
        hidden_NH: Tensor,
        targets_N: Tensor,
        mapping: LogitMap,
        kernels: RowKernels | None = None,
        reference: ReferenceRows | None = None,
        floor_N: Tensor | None = None,
    ) -> None:
        self.floor = floor_N
        self.head, self.hidden, self.targets, self.mapping = head, hidden_NH, targets_N, mapping
        self.reference = reference
        self.kernels = kernels or row_kernels(
            hidden_NH.device.type, head.logits_dtype, head.vocab, with_reference=reference is not None
        )

    def reserve(self, chunk_rows: int) -> None:
        """Allocate logits buffers for chunks of up to this many rows at the first chunk."""
        rows = min(chunk_rows, self.hidden.shape[0])
        for head in (self.head, *(() if self.reference is None else (self.reference.head,))):
            head.reserve(rows)

    def logits_of(self, start: int, stop: int, with_reference: bool = True) -> ChunkLogits:
        """Compute the logits of rows [start, stop)."""
        logits = self.head.logits(self.hidden[start:stop])
        if self.floor is not None:
            rows = self.targets[start:stop], self.floor[start:stop], self.mapping.rows(start, stop)
            drop_tokens(logits, *rows, self.kernels.stats)
        if self.reference is None or not with_reference:
            return ChunkLogits(logits, None)
        return ChunkLogits(logits, self.reference.head.logits(self.reference.hidden_NH[start:stop]))

    def stats_of(self, start: int, stop: int, with_entropy: bool) -> tuple[ChunkLogits, RowStats]:
        """Return the logits of rows [start, stop) and their statistics."""
        chunk = self.logits_of(start, stop)
        targets, mapping = self.targets[start:stop], self.mapping.rows(start, stop)
        if chunk.ref_logits is None:
            return chunk, RowStats.from_outputs(self.kernels.stats(chunk.logits, targets, *mapping, with_entropy))
        assert self.kernels.stats_kl is not None, "reference logits without the row ops that read them"
        return chunk, RowStats.from_outputs(self.kernels.stats_kl(*chunk, targets, *mapping))

    def all_stats(self, chunks: Chunks, with_entropy: bool) -> RowStats:
        """Return the statistics of every row."""
        stats = [self.stats_of(start, stop, with_entropy)[1] for start, stop in chunks]
        return concatenate(stats, self.hidden, with_reference=self.reference is not None)

    def add_gradients(
        self, gradients: HeadGradients, chunk: ChunkLogits, stats: RowStats, start: int, upstream: RowGradients
    ) -> None:
        """Add the gradient of one chunk, in order of the chunks; may overwrite its logits.

        Args:
            chunk: logits of rows [start, start+R); its reference is not read if `upstream` has no kl.
            stats, upstream: of these rows.
        """
        logits = chunk.logits
        stop = start + logits.shape[0]
        targets, mapping = self.targets[start:stop], self.mapping.rows(start, stop)
        entropy = None if upstream.entropy is None else stats.entropy
        row = targets, stats.logprob, entropy, stats.row_max, stats.log_sum
        out = gradients.out_for(logits)
        if upstream.kl is None:
            dlogits = self.kernels.grad(logits, *row, upstream.logprob, upstream.entropy, *mapping, out)
        else:
            assert self.kernels.grad_kl is not None, "reference logits without the row ops that read them"
            assert stats.reference is not None, "a gradient of a KL without its statistics"
            dlogits = self.kernels.grad_kl(*chunk, *row, *stats.reference, *upstream, *mapping, out)
        gradients.add(dlogits, start)

    def recompute_gradients(
        self, gradients: HeadGradients, chunks: Chunks, stats: RowStats, upstream: RowGradients
    ) -> None:
        """Recompute the logits chunk by chunk and add their gradients; stats and `upstream` are of all N rows."""
        for start, stop in chunks:
            chunk = self.logits_of(start, stop, with_reference=upstream.kl is not None)
            self.add_gradients(gradients, chunk, stats.rows(start, stop), start, upstream.rows(start, stop))
