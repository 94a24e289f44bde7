"""The custom ops `torch.ops.hwgrpo.*`, one node each for torch.compile, with fake kernels and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .argument_checks import check_target_range
from .chunks import chunk_rows_for, even_chunks, longest
from .guards import without_autocast
from .head import Head, HeadGradients, logits_buffers
from .logit_map import LogitMap
from .matrices import accumulated
from .registry import default_registry
from .square_sum import square_sum
from .streaming import RowGradients, RowKernels, RowStats, Stream, concatenate, row_kernels

Stats = tuple[Tensor, Tensor, Tensor, Tensor]


def _fake_stats(rows: int | torch.SymInt, like: Tensor, with_entropy: bool) -> Stats:
    def make(size: int | torch.SymInt) -> Tensor:
        return like.new_empty(size, dtype=accumulated(like.dtype))

    return make(rows), make(rows if with_entropy else 0), make(rows), make(rows)


@torch.library.custom_op("hwgrpo::row_stats", mutates_args=())
def row_stats(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the selected implementation of `definitions.row_stats`."""
    choice = default_registry.resolve("row_stats", logits.device.type, logits.dtype, logits.shape[1])
    return choice.function(logits, targets, scale, squash, row_scale, with_entropy)


@row_stats.register_fake
def _(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> Stats:
    return _fake_stats(logits.shape[0], logits, with_entropy)


@torch.library.custom_op("hwgrpo::row_grad", mutates_args=("out",))
def row_grad(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Run the selected implementation of `definitions.row_grad`."""
    choice = default_registry.resolve("row_grad", logits.device.type, logits.dtype, logits.shape[1])
    choice.function(
        logits, targets, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, scale, squash, row_scale, out
    )


@torch.library.custom_op("hwgrpo::token_logprob", mutates_args=())
def token_logprob(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return statistics of logits, differentiable in them."""
    check_target_range(targets, logits.shape[1])
    choice = default_registry.resolve("token_logprob", logits.device.type, logits.dtype, logits.shape[1])
    return choice.function(logits, targets, scale, squash, row_scale, with_entropy)


@token_logprob.register_fake
def _(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> Stats:
    return _fake_stats(logits.shape[0], logits, with_entropy)


def token_logprob_in_torch(
    logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
) -> Stats:
    """Implement `token_logprob` as "torch": `row_stats` over chunks of rows that fit the cache."""
    kernels = row_kernels(logits.device.type, logits.dtype, logits.shape[1])
    mapping = LogitMap(scale, squash, row_scale)
    chunks = even_chunks(logits.shape[0], chunk_rows_for(logits.shape[1], logits.dtype, logits.device.type))
    stats = [
        RowStats.from_outputs(kernels.stats(logits[a:b], targets[a:b], *mapping.rows(a, b), with_entropy))
        for a, b in chunks
    ]
    return concatenate(stats, logits)[:4]


def _save_stats(ctx: Any, output: Stats) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], output[3])


def _token_logprob_setup(ctx: Any, inputs: tuple[Any, ...], output: Stats) -> None:
    logits, targets, ctx.scale, ctx.squash, row_scale, _ = inputs
    ctx.save_for_backward(logits, targets, row_scale, *output)
    _save_stats(ctx, output)


@torch.library.custom_op("hwgrpo::token_logprob_backward", mutates_args=())
def token_logprob_backward(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
) -> Tensor:
    """Return the gradient of `token_logprob`; a separate op, so that differentiating it raises instead of giving 0."""
    out = torch.empty_like(logits)
    row_grad(
        logits, targets, logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, scale, squash, row_scale, out
    )
    return out


@token_logprob_backward.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
) -> Tensor:
    return torch.empty_like(logits)


def _refuse_second_order(name: str) -> Callable[..., Any]:
    """Return a backward of the backward that raises an error with the op's name."""

    def refuse(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(f"{name} has no second derivative (create_graph=True): use log_softmax over full logits")

    return refuse


token_logprob_backward.register_autograd(_refuse_second_order("token_logprob"))


def _token_logprob_backward(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, targets, row_scale, logprob, entropy, row_max, log_sum = ctx.saved_tensors
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(logprob)
    grad = token_logprob_backward(
        logits, targets, logprob, None if grad_entropy is None else entropy, row_max, log_sum,
        grad_logprob, grad_entropy, ctx.scale, ctx.squash, row_scale,
    )  # fmt: skip
    return grad, None, None, None, None, None


token_logprob.register_autograd(_token_logprob_backward, setup_context=_token_logprob_setup)


@torch.library.custom_op("hwgrpo::linear_logprob", mutates_args=())
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return statistics of the head's logits, computed in chunks; differentiable in hidden, weight and bias."""
    check_target_range(targets, weight.shape[0])
    choice = default_registry.resolve("linear_logprob", hidden.device.type, hidden.dtype, weight.shape[0])
    return choice.function(
        hidden, weight, targets, bias, scale, squash, row_scale, with_entropy, chunk_rows, logits_dtype
    )


@linear_logprob.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> Stats:
    return _fake_stats(hidden.shape[0], hidden, with_entropy)


def open_stream(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, mapping: LogitMap,
    chunk_rows: int | None, logits_dtype: torch.dtype | None, kernels: RowKernels | None = None,
    floor: Tensor | None = None,
) -> tuple[Stream, list[tuple[int, int]]]:  # fmt: skip
    """Return the stream of the rows and its chunks; the hidden states have the GEMMs' dtype."""
    device_type = hidden.device.type
    head = Head(weight, bias, hidden.dtype, logits_dtype or hidden.dtype)
    buffers = logits_buffers(hidden.dtype, head.logits_dtype, device_type)
    rows = chunk_rows or chunk_rows_for(head.vocab, head.logits_dtype, device_type, buffers)
    stream = Stream(head, head.operand(hidden, hidden.dtype), targets, mapping, kernels, floor_N=floor)
    return stream, even_chunks(hidden.shape[0], rows)


def linear_logprob_in_torch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> Stats:
    """Implement `linear_logprob` as "torch": stream the rows through the selected `row_stats`."""
    with torch.no_grad(), without_autocast(hidden.device.type):
        mapping = LogitMap(scale, squash, row_scale)
        stream, chunks = open_stream(hidden, weight, targets, bias, mapping, chunk_rows, logits_dtype)
        return stream.all_stats(chunks, with_entropy)[:4]


def score_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, mapping: LogitMap, with_entropy: bool,
    chunk_rows: int | None, logits_dtype: torch.dtype | None, floor: Tensor | None, with_square_sum: bool,
) -> tuple[RowStats, Tensor | None]:  # fmt: skip
    """Compute `linear_logprob` without gradient, with what only scoring has.

    Args:
        floor: [N], for the tokens that `kept_tokens.drop_tokens` keeps; None: all.
        with_square_sum: also return `square_sum` [N].
    """
    check_target_range(targets, weight.shape[0])
    parameters: tuple[Any, ...] = hidden, weight, bias
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in parameters):
        option, remedy = "with_square_sum", "use torch.no_grad"
        if not with_square_sum:
            option, remedy = "a logprob_floor", "use torch.no_grad or linear_token_loss"
        raise ValueError(f"linear_logprob with {option} has no gradient: {remedy}")
    with torch.no_grad(), without_autocast(hidden.device.type):
        stream, chunks = open_stream(hidden, weight, targets, bias, mapping, chunk_rows, logits_dtype, floor=floor)
        if not with_square_sum:
            return stream.all_stats(chunks, with_entropy), None
        stats: list[RowStats] = []
        sums = [hidden.new_empty(0, dtype=accumulated(hidden.dtype))]
        for start, stop in chunks:
            chunk, of_chunk = stream.stats_of(start, stop, with_entropy)
            stats.append(of_chunk)
            sums.append(square_sum(chunk.logits, of_chunk.row_max, of_chunk.log_sum, mapping.rows(start, stop)))
        return concatenate(stats, hidden), torch.cat(sums)


@torch.library.custom_op("hwgrpo::linear_logprob_backward", mutates_args=())
def linear_logprob_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `linear_logprob`, recomputing the logits in chunks; unneeded ones are empty."""
    with torch.no_grad(), without_autocast(hidden.device.type):
        mapping = LogitMap(scale, squash, row_scale)
        stream, chunks = open_stream(hidden, weight, targets, bias, mapping, chunk_rows, logits_dtype)
        needs = {"hidden": needs_hidden, "weight": needs_weight, "bias": needs_bias}
        gradients = HeadGradients(stream.head, stream.hidden, longest(chunks), **needs)
        stats = RowStats(logprob, entropy, row_max, log_sum)
        stream.recompute_gradients(gradients, chunks, stats, RowGradients(grad_logprob, grad_entropy))
        grads = gradients.finish()
        del stream, gradients  # frees their buffers for the casts
    parameters = (hidden, weight, weight if bias is None else bias)
    dx, dw, db = (like.new_empty(0) if grad is None else grad.to(like.dtype) for grad, like in zip(grads, parameters))
    return dx, dw, db


@linear_logprob_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    logprob: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if needs_hidden else 0),
        weight.new_empty(weight.shape if needs_weight else 0),
        (weight if bias is None else bias).new_empty(weight.shape[0] if needs_bias else 0),
    )


linear_logprob_backward.register_autograd(_refuse_second_order("linear_logprob"))


def _linear_logprob_setup(ctx: Any, inputs: tuple[Any, ...], output: Stats) -> None:
    hidden, weight, targets, bias, ctx.scale, ctx.squash, row_scale, _, ctx.chunk_rows, ctx.logits_dtype = inputs
    ctx.save_for_backward(hidden, weight, targets, bias, row_scale, *output)
    _save_stats(ctx, output)


def _linear_logprob_grads(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, bias, row_scale, *stats = ctx.saved_tensors
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(stats[0])
    needs = [ctx.needs_input_grad[index] for index in (0, 1, 3)]
    grads = linear_logprob_backward(
        hidden, weight, targets, bias, *stats, grad_logprob, grad_entropy, ctx.scale, ctx.squash, row_scale,
        ctx.chunk_rows, ctx.logits_dtype, *needs,
    )  # fmt: skip
    dx, dw, db = (grad if need else None for grad, need in zip(grads, needs))
    return dx, dw, None, db, None, None, None, None, None, None


linear_logprob.register_autograd(_linear_logprob_grads, setup_context=_linear_logprob_setup)


@torch.library.custom_op("hwgrpo::dequantize_nf4", mutates_args=())
def dequantize_nf4(packed: Tensor, scales: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values [*size] in a dtype, by the selected implementation of `definitions.dequantize_nf4`."""
    choice = default_registry.resolve("dequantize_nf4", packed.device.type, dtype, size[-1])
    return choice.function(packed, scales, packed.new_empty(size, dtype=dtype))


@dequantize_nf4.register_fake
def _(packed: Tensor, scales: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(size, dtype=dtype)
