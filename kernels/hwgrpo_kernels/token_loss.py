"""`linear_token_loss`: any loss of per-token log-probability and entropy, with its gradients made in the forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import argument_checks
from .chunks import chunk_rows_for, even_chunks, sequence_chunks
from .guards import compute_dtype_of, refuse_checkpointed_region, refuse_compiled_region, without_autocast
from .head import Head, HeadGradients, logits_buffers
from .logit_map import logit_map
from .loss_calls import LossCalls, LossFunction
from .reference import ReferenceHead, beside, check_reference
from .streaming import RowStats, Stream, join, row_kernels
from .vocab_agreement import agree, told_to_all_ranks

Scope = Literal["token", "sequence", "batch"]


@dataclass(frozen=True)
class TokenLoss:
    """Result of `linear_token_loss`.

    Args:
        loss: [] sum of the per-row losses of unmasked rows; its backward hands out gradients made already.
        logprob_N, entropy_N: [N] without gradient; 0 in masked rows.
        kl_N: [N] full KL divergence (nats) from the reference, without gradient, 0 in masked rows; None without one.
        sums: metric -> [] sum over unmasked rows.
    """

    loss: Tensor
    logprob_N: Tensor
    entropy_N: Tensor
    kl_N: Tensor | None
    sums: dict[str, Tensor]


def linear_token_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    loss_fn: LossFunction,
    *,
    rows: Mapping[str, Tensor],
    row_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scope: Scope = "token",
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    reference: ReferenceHead | None = None,
) -> TokenLoss:
    """Stream the vocabulary for any loss of per-token statistics; [N,V] logits never exist.

    Per chunk of rows: logits, their statistics, `loss_fn` under autograd on vectors for dL/dlogprob and dL/dentropy,
    and from these the gradients of hidden, weight and bias, which backward only multiplies by its grad_output.

    Args:
        hidden_NH: [N,H]; its dtype (autocast's, where autocast is on) is that of the GEMMs.
        weight_VH: [V,H]; frozen (requires_grad False) it costs a third less. Gradients come in the parameter's dtype.
        targets_N: [N] int64 in [0,V); masked rows may hold anything.
        loss_fn: (stats, rows) -> (loss_per_row [R], {name: metric per row [R]}), in ordinary torch, fp32, autocast
            off. It holds every weight and normaliser. Gradients go to stats alone, to nothing it closes over.
        rows: name -> [N, ...] tensor without gradient, cut to the rows that loss_fn sees.
        row_mask: [N] bool, True for rows that count; others never meet the head (reading it waits for the device).
        cu_seqlens: [S+1] row offsets of the sequences, 0 first and N last; best on the CPU. Scope "token" does not
            look at them.
        scope: what one call of loss_fn must see: "token" any rows; "sequence" whole sequences (chunks are aligned to
            them, and if one is longer than a chunk, as for "batch"); "batch" all rows at once: statistics of all
            rows first, then the logits a second time for the gradients.
        bias, temperature, softcap, logit_scale, logits_dtype, chunk_rows: as for `linear_logprob`.
        vocab_group: process group whose ranks have consecutive rows of one head in rank order, any number each: then
            weight_VH [V_r,H], bias [V_r] and their gradients are this rank's part, and all else is the same on all
            ranks: arguments, result, and the gradient of hidden_NH, which is summed over the ranks here. All ranks
            call at the same time; each chunk of rows costs an all-gather of four numbers per
            row, nine with a reference.
        reference: hidden states and head of a reference with the same vocabulary: loss_fn then also gets full_kl, the
            KL divergence from its whole distribution under the same softcap, logit_scale and temperature, and
            ref_logprob. Costs 2 N H' V FLOPs; the default chunks have half the rows, for two buffers of logits.

    Returns:
        `TokenLoss`. Without unmasked rows the loss is a zero with a graph, so that backward gives zero gradients.

    Raises:
        ValueError: an argument, or what loss_fn returned, has a wrong shape, dtype, device or range.
        RuntimeError: called inside a checkpointed or compiled region; backward called twice.
    """
    refuse_compiled_region("linear_token_loss")
    with told_to_all_ranks(vocab_group):
        names = argument_checks.HeadNames("hidden_NH", "weight_VH", targets="targets_N")
        argument_checks.check_head(hidden_NH, weight_VH, bias, names)
        argument_checks.check_targets(targets_N, hidden_NH, names.targets, names.hidden)
        device_type, n = hidden_NH.device.type, hidden_NH.shape[0]
        argument_checks.check_map(temperature, softcap, logit_scale, n, hidden_NH)
        chunk_rows = argument_checks.check_chunk_rows(chunk_rows)
        reference = check_reference(reference, hidden_NH, weight_VH)
        compute_dtype = compute_dtype_of(hidden_NH)
        logits_dtype = argument_checks.check_logits_dtype(logits_dtype, compute_dtype)
        bounds = argument_checks.check_rows(hidden_NH, loss_fn, rows, row_mask, cu_seqlens, scope)
        with_reference = reference is not None
        kernels = row_kernels(device_type, logits_dtype, weight_VH.shape[0], beside=with_reference)
        parameters = (hidden_NH, weight_VH, bias)
        wants = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in parameters)
        if any(wants):
            refuse_checkpointed_region("linear_token_loss")
        with torch.no_grad(), without_autocast(device_type):
            hidden, targets, live = hidden_NH, targets_N.long(), _live_rows(row_mask)
            mapping = logit_map(temperature, softcap, logit_scale)
            if row_mask is not None and live is not None:
                hidden, targets, mapping = hidden[live], targets[live], mapping.select(live)
                rows = {name: each[live] for name, each in rows.items()}
                bounds = None if bounds is None else _count_before(row_mask, bounds)
            head = Head(weight_VH, bias, compute_dtype, logits_dtype)
            operand = head.operand(hidden, compute_dtype)
            second = None if reference is None else beside(reference, head, weight_VH, compute_dtype, live)

    with torch.no_grad(), without_autocast(device_type):
        same = {
            "hidden_NH's requires_grad": wants[0],
            "the number of rows that row_mask leaves": targets.shape[0],
            "cu_seqlens": bounds,
            "scope": scope,
            "logits_dtype": logits_dtype,
            "chunk_rows": chunk_rows,
            "reference's H": None if reference is None else reference.hidden_NH.shape[1],
        }
        same_values = {"targets_N": targets, "row_mask": targets.new_empty(0) if live is None else live}
        vocab = agree(vocab_group, weight_VH, hidden_NH, same, same_values)
        argument_checks.check_target_range(targets, vocab.total)
        stream = Stream(head, operand, targets, mapping, vocab.kernels(kernels), second)
        call = LossCalls(loss_fn, rows, bounds, hidden.device, with_reference)
        buffers = logits_buffers(compute_dtype, logits_dtype, device_type) + with_reference
        size = chunk_rows or chunk_rows_for(vocab.largest, logits_dtype, device_type, buffers)
        stream.expect(size)
        gradients = HeadGradients(head, stream.hidden, size, hidden=wants[0], weight=wants[1], bias=wants[2])
        stats = _run(stream, call, gradients, size, scope, any(wants))
        made = gradients.finish()
        logprob_N, entropy_N = _spread(stats.logprob, live, n), _spread(stats.entropy, live, n)
        kl_N = None if stats.beside is None else _spread(stats.beside.kl, live, n)
        loss = call.loss if call.loss is not None else stats.logprob.new_zeros(())
        dx = None if made[0] is None else _spread(vocab.sum(made[0]), live, n)
    if any(wants):
        loss = _GradientsMadeInForward.apply(loss, (dx, *made[1:]), *parameters)
    return TokenLoss(loss, logprob_N, entropy_N, kl_N, call.sums)


def _run(
    stream: Stream, call: LossCalls, gradients: HeadGradients, chunk_rows: int, scope: Scope, wants: bool
) -> RowStats:
    """Run `loss_fn` over all rows as its scope asks; return the statistics of all rows."""
    n = stream.targets.shape[0]
    if n == 0:
        call.learn_names()
        return join([], stream.hidden, beside=stream.beside is not None)
    chunks = even_chunks(n, chunk_rows)
    whole = scope == "batch"
    sequences: list[tuple[int, int] | None] = [None] * len(chunks)
    if scope == "sequence" and len(chunks) > 1:
        assert call.bounds is not None, "scope sequence without cu_seqlens passed the checks"
        aligned = sequence_chunks(call.bounds, chunk_rows)
        whole = aligned is None
        if aligned is not None:
            sequences = list(aligned)
            chunks = [(call.bounds[first], call.bounds[last]) for first, last in aligned]
    if whole and len(chunks) > 1:
        stats = stream.all_stats(chunks, with_entropy=True)
        wanted = call(stats, 0, n, None, wants)
        if wants:
            stream.recompute_gradients(gradients, chunks, stats, wanted)
        return stats
    parts = []
    for (start, stop), span in zip(chunks, sequences):
        chunk, stats = stream.stats_of(start, stop, with_entropy=True)
        wanted = call(stats, start, stop, span, wants)
        if wants:
            stream.add_gradients(gradients, chunk, stats, start, wanted)
        parts.append(stats)
    return join(parts, stream.hidden)


class _GradientsMadeInForward(torch.autograd.Function):
    """Ties a loss to gradients known already; backward multiplies them by grad_output and gives them away."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *parameters: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if each is None else each.dtype for each in parameters]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_token_loss makes its gradients in the forward, and its first backward gave them away: "
                "backward(retain_graph=True) cannot repeat it; call linear_token_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        (grad_output,) = grad_outputs
        unchanged = grad_output.device.type == "cpu" and float(grad_output) == 1.0  # elsewhere reading it would wait
        scaled = (each if each is None or unchanged else each.mul_(grad_output) for each in gradients)
        return None, None, *(each if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes))


def _live_rows(row_mask: Tensor | None) -> Tensor | None:
    """Return the indices of the rows that count, or None for all."""
    if row_mask is None:
        return None
    live = row_mask.nonzero()[:, 0]
    return None if live.numel() == row_mask.numel() else live


def _spread(values: Tensor, live: Tensor | None, n: int) -> Tensor:
    """Put the values of live rows back among N rows of zeros."""
    if live is None:
        return values
    return values.new_zeros(n, *values.shape[1:]).index_copy_(0, live, values)


def _count_before(row_mask: Tensor, bounds: list[int]) -> list[int]:
    counts = torch.cumsum(row_mask, 0).cpu()
    return [0 if bound == 0 else int(counts[bound - 1]) for bound in bounds]
