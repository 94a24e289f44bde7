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
    """The implementations of the two row ops chosen for one device, logits dtype and vocabulary."""

    stats: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    grad: Callable[..., Tensor]


class RowStats(NamedTuple):
    """What `row_stats` returns, for R rows: logprob, entropy, row_max, log_sum, each [R]."""

    logprob: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor

    def rows(self, start: int, stop: int) -> "RowStats":
        """Return the statistics of rows [start, stop)."""
        return RowStats(*(each[start:stop] for each in self))


def row_kernels(device_type: str, logits_dtype: torch.dtype, vocab: int) -> RowKernels:
    """Resolve `row_stats` and `row_grad`."""
    return RowKernels(
        default_registry.resolve("row_stats", device_type, logits_dtype, vocab).function,
        default_registry.resolve("row_grad", device_type, logits_dtype, vocab).function,
    )


def join(parts: list[RowStats], like: Tensor) -> RowStats:
    """Concatenate the statistics of consecutive chunks; no chunks give empty tensors in the dtype for `like`."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return RowStats(*(like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32)) for _ in range(4)))
    return RowStats(*(torch.cat(each) for each in zip(*parts)))


class Stream:
    """Rows [N,H] and targets [N] against one head.

    Args:
        head: the LM head.
        hidden_NH: from `Head.operand`.
        targets_N: int64.
        mapping: from raw logits to the distribution's.
        kernels: the row kernels; resolved from the registry when None.
    """

    def __init__(
        self, head: Head, hidden_NH: Tensor, targets_N: Tensor, mapping: LogitMap, kernels: RowKernels | None = None
    ) -> None:
        self.head, self.hidden, self.targets, self.mapping = head, hidden_NH, targets_N, mapping
        self.kernels = kernels or row_kernels(hidden_NH.device.type, head.logits_dtype, head.vocab)

    def stats_of(self, start: int, stop: int, with_entropy: bool) -> tuple[Tensor, RowStats]:
        """Return the raw logits [R,V] of rows [start, stop), valid until the next call, and their statistics."""
        logits = self.head.logits(self.hidden[start:stop])
        stats = self.kernels.stats(logits, self.targets[start:stop], *self.mapping.rows(start, stop), with_entropy)
        return logits, RowStats(*stats)

    def all_stats(self, chunks: Chunks, with_entropy: bool) -> RowStats:
        """Return the statistics of every row."""
        return join([self.stats_of(start, stop, with_entropy)[1] for start, stop in chunks], self.hidden)

    def add_gradients(
        self,
        gradients: HeadGradients,
        logits: Tensor,
        stats: RowStats,
        start: int,
        grad_logprob: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """Add the gradient of one chunk, overwriting its logits.

        Args:
            logits: [R,V] raw logits of rows [start, start+R).
            stats: their statistics.
            grad_logprob, grad_entropy: [R] g and g_H; None means zero.
        """
        stop = start + logits.shape[0]
        scale, squash, row_scale = self.mapping.rows(start, stop)
        entropy = None if grad_entropy is None else stats.entropy
        dlogits = self.kernels.grad(
            logits, self.targets[start:stop], stats.logprob, entropy, stats.row_max, stats.log_sum,
            grad_logprob, grad_entropy, scale, squash, row_scale, logits,
        )  # fmt: skip
        gradients.add(dlogits, self.hidden[start:stop], start)

    def recompute_gradients(
        self,
        gradients: HeadGradients,
        chunks: Chunks,
        stats: RowStats,
        grad_logprob: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        """Make the logits again, chunk by chunk, and add their gradients under known g [N] and g_H [N]."""
        for start, stop in chunks:
            logits = self.head.logits(self.hidden[start:stop])
            g_h = None if grad_entropy is None else grad_entropy[start:stop]
            self.add_gradients(gradients, logits, stats.rows(start, stop), start, grad_logprob[start:stop], g_h)
