"""`linear_logprob` for a vocabulary-parallel head: no custom op, since a process group is no op argument."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .argument_checks import check_target_range
from .chunks import chunk_rows_for, longest
from .guards import without_autocast
from .head import HeadGradients, logits_buffers
from .library import open_stream
from .logit_map import LogitMap
from .streaming import RowGradients, RowKernels, RowStats, Stream, row_kernels
from .vocab_checks import exchange_shards, raise_on_all_ranks
from .vocab_parallel import VocabShard


class _Call(NamedTuple):
    """The arguments of `_VocabParallelLogprob` that are not tensors."""

    vocab: VocabShard
    kernels: RowKernels
    scale: float
    squash: float
    with_entropy: bool
    chunk_rows: int
    logits_dtype: torch.dtype


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mapping: LogitMap,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
    group: dist.ProcessGroup,
) -> RowStats:
    """Compute `library.linear_logprob` from this rank's shard of the head, `weight` [V_r,H] and `bias` [V_r]."""
    dtype, device_type = logits_dtype or hidden.dtype, hidden.device.type
    with raise_on_all_ranks(group):
        kernels = row_kernels(device_type, dtype, weight.shape[0])
    same = {
        "hidden's requires_grad": torch.is_grad_enabled() and hidden.requires_grad,
        "with_entropy": with_entropy,
        "chunk_rows": chunk_rows,
        "logits_dtype": dtype,
    }
    vocab = exchange_shards(group, weight, hidden, same, {"targets": targets})
    check_target_range(targets, vocab.total)
    buffers = logits_buffers(hidden.dtype, dtype, device_type)
    size = chunk_rows or chunk_rows_for(vocab.largest, dtype, device_type, buffers)
    call = _Call(vocab, vocab.kernels(kernels), mapping.scale, mapping.squash, with_entropy, size, dtype)
    return RowStats(*_VocabParallelLogprob.apply(hidden, weight, bias, targets, mapping.row_scale_N, call))


def _stream(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, row_scale: Tensor | None, call: _Call
) -> tuple[Stream, list[tuple[int, int]]]:
    mapping = LogitMap(call.scale, call.squash, row_scale)
    return open_stream(hidden, weight, targets, bias, mapping, call.chunk_rows, call.logits_dtype, call.kernels)


class _VocabParallelLogprob(torch.autograd.Function):
    """Statistics of full rows; backward recomputes the logits and sums dX over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, row_scale, call) -> tuple[Tensor, ...]:
        with without_autocast(hidden.device.type):
            stream, chunks = _stream(hidden, weight, bias, targets, row_scale, call)
            stats = stream.all_stats(chunks, call.with_entropy)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, targets, row_scale, *stats[:4])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats.row_max, stats.log_sum)
        return stats[:4]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, row_scale, *saved = ctx.saved_tensors
        stats, (grad_logprob, grad_entropy, *_) = RowStats(*saved), grads
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(stats.logprob)
        needs = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad))
        with without_autocast(hidden.device.type):
            stream, chunks = _stream(hidden, weight, bias, targets, row_scale, ctx.call)
            gradients = HeadGradients(stream.head, stream.hidden, longest(chunks), **needs)
            stream.recompute_gradients(gradients, chunks, stats, RowGradients(grad_logprob, grad_entropy))
            dx, *rest = gradients.finish()
        gradients = (None if dx is None else ctx.call.vocab.all_reduce(dx), *rest)
        cast = (None if each is None else each.to(like.dtype) for each, like in zip(gradients, (hidden, weight, bias)))
        return *cast, None, None, None
