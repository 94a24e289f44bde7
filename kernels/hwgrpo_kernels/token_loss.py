"""`linear_token_loss`: any loss of per-token log-probability and entropy, with gradients computed in the forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import argument_checks
from .chunks import chunk_rows_for, even_chunks, sequence_chunks
from .guards import compute_dtype_of, refuse_checkpointed_region, refuse_compiled_region, without_autocast
from .head import Head, HeadGradients, logits_buffers, operand_dtype
from .kept_tokens import check_floor
from .logit_map import logit_map
from .loss_calls import LossCalls, LossFunction
from .precomputed_gradients import PrecomputedGradients
from .reference import ReferenceHead, check_reference, prepare_reference
from .streaming import RowStats, Stream, concatenate, row_kernels
from .vocab_checks import exchange_shards, raise_on_all_ranks

Scope = Literal["token", "sequence", "batch"]


@dataclass(frozen=True)
class TokenLoss:
    """Result of `linear_token_loss`.

    Args:
        loss: [] sum of the per-row losses of unmasked rows; its gradients are already computed.
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
    weight_operand_VH: Tensor | None = None,
    final_gradients: bool = False,
    logprob_floor: Tensor | None = None,
) -> TokenLoss:
    """Stream the vocabulary for any loss of per-token statistics; [N,V] logits never exist.

    Per chunk of rows: logits, their statistics, `loss_fn` under autograd for dL/dlogprob and dL/dentropy, then the
    gradients of hidden, weight and bias. Backward only multiplies these by its grad_output.

    Args:
        hidden_NH: [N,H]; its dtype (autocast's, where autocast is on) is that of the GEMMs.
        weight_VH: [V,H]; a frozen weight costs a third less. Its gradient has the parameter's dtype.
        targets_N: [N] int64 in [0,V); ignored in masked rows.
        loss_fn: (stats, rows) -> (loss_per_row [R], {name: metric per row [R]}), in ordinary torch, fp32, autocast
            off. It applies every weight and normalizer. Only stats get gradients, not tensors of its closure.
        rows: name -> [N, ...] tensor without gradient, sliced to the rows of each loss_fn call.
        row_mask: [N] bool, False for rows to skip, which never enter the head (synchronizes with the device).
        cu_seqlens: [S+1] row offsets of the sequences, from 0 to N; best on the CPU. Ignored by scope "token".
        scope: rows that one loss_fn call must see: "token" any rows; "sequence" full sequences (chunks are aligned to
            them; if one is longer than a chunk, as for "batch"); "batch" all rows at once: statistics of all rows
            first, then the logits again for the gradients.
        bias, temperature, softcap, logit_scale, logits_dtype, chunk_rows: as for `linear_logprob`.
        vocab_group: process group over which the head is sharded by rows, in rank order, any number each. weight_VH
            [V_r,H], bias [V_r] and their gradients are then this rank's shard; all other arguments, the result and
            the gradient of hidden_NH (all-reduced here) are the same on all ranks. All ranks must call together; each
            chunk costs an all-gather of four numbers per row, nine with a reference.
        reference: hidden states and head of a reference model with the same vocabulary: loss_fn also gets full_kl, the
            KL divergence over the full vocabulary under the same softcap, logit_scale and temperature, and
            ref_logprob. Costs 2 N H' V FLOPs; default chunks have half the rows, for two logits buffers.
        weight_operand_VH: `weight_operand(weight_VH, ...)`, if one cast serves several calls; None casts here.
        final_gradients: promise that backward's grad_output is 1, as for `loss.backward()` and a sum with other losses.
            The gradients are then returned as computed: a device's grad_output cannot be read without waiting for it,
            and multiplying by it reads and writes all of dW. If it is not 1, backward raises on a CPU, and makes
            gradients NaN elsewhere.
        logprob_floor: as for `linear_logprob`, here with gradients; does not support a reference either.

    Returns:
        `TokenLoss`. Without unmasked rows the loss is a differentiable zero.

    Raises:
        ValueError: an argument or a result of loss_fn has a wrong shape, dtype, device or range.
        RuntimeError: called inside a checkpointed or compiled region; backward called twice.
    """
    refuse_compiled_region("linear_token_loss")
    with raise_on_all_ranks(vocab_group):
        names = argument_checks.HeadNames("hidden_NH", "weight_VH", targets="targets_N")
        argument_checks.check_head(hidden_NH, weight_VH, bias, names)
        argument_checks.check_targets(targets_N, hidden_NH, names.targets, names.hidden)
        device_type, n = hidden_NH.device.type, hidden_NH.shape[0]
        argument_checks.check_map(temperature, softcap, logit_scale, n, hidden_NH)
        chunk_rows = argument_checks.check_chunk_rows(chunk_rows)
        reference = check_reference(reference, hidden_NH, weight_VH)
        compute_dtype = compute_dtype_of(hidden_NH)
        logits_dtype = argument_checks.check_logits_dtype(logits_dtype, compute_dtype)
        if weight_operand_VH is not None:
            dtype = operand_dtype(compute_dtype, logits_dtype, device_type)
            argument_checks.check_operand(weight_operand_VH, weight_VH, dtype)
        check_floor(logprob_floor, hidden_NH, softcap, vocab_group or reference)
        bounds = argument_checks.check_rows(hidden_NH, loss_fn, rows, row_mask, cu_seqlens, scope)
        with_reference = reference is not None
        kernels = row_kernels(device_type, logits_dtype, weight_VH.shape[0], with_reference=with_reference)
        parameters = (hidden_NH, weight_VH, bias)
        needs_grad = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in parameters)
        if any(needs_grad):
            refuse_checkpointed_region("linear_token_loss")
        with torch.no_grad(), without_autocast(device_type):
            hidden, targets, unmasked = hidden_NH, targets_N.long(), _unmasked_rows(row_mask)
            mapping = logit_map(temperature, softcap, logit_scale)
            if row_mask is not None and unmasked is not None:
                hidden, targets, mapping = hidden[unmasked], targets[unmasked], mapping.select(unmasked)
                rows = {name: each[unmasked] for name, each in rows.items()}
                logprob_floor = None if logprob_floor is None else logprob_floor[unmasked]
                bounds = None if bounds is None else _unmasked_before(row_mask, bounds)
            head = Head(weight_VH, bias, compute_dtype, logits_dtype, weight_operand_VH)
            operand = head.operand(hidden, compute_dtype)
            reference_rows = (
                None if reference is None else prepare_reference(reference, head, weight_VH, compute_dtype, unmasked)
            )

    with torch.no_grad(), without_autocast(device_type):
        same = {
            "hidden_NH's requires_grad": needs_grad[0],
            "the number of unmasked rows": targets.shape[0],
            "cu_seqlens": bounds,
            "scope": scope,
            "logits_dtype": logits_dtype,
            "chunk_rows": chunk_rows,
            "reference's H": None if reference is None else reference.hidden_NH.shape[1],
        }
        same_values = {"targets_N": targets, "row_mask": targets.new_empty(0) if unmasked is None else unmasked}
        vocab = exchange_shards(vocab_group, weight_VH, hidden_NH, same, same_values)
        argument_checks.check_target_range(targets, vocab.total)
        stream = Stream(head, operand, targets, mapping, vocab.kernels(kernels), reference_rows, logprob_floor)
        call = LossCalls(loss_fn, rows, bounds, hidden.device, with_reference)
        buffers = logits_buffers(compute_dtype, logits_dtype, device_type) + with_reference
        size = chunk_rows or chunk_rows_for(vocab.largest, logits_dtype, device_type, buffers)
        stream.reserve(size)
        gradients = HeadGradients(
            head, stream.hidden, size, hidden=needs_grad[0], weight=needs_grad[1], bias=needs_grad[2]
        )
        stats = _run(stream, call, gradients, size, scope, any(needs_grad))
        dx, *weight_gradients = gradients.finish()
        logprob_N, entropy_N = _scatter(stats.logprob, unmasked, n), _scatter(stats.entropy, unmasked, n)
        kl_N = None if stats.reference is None else _scatter(stats.reference.kl, unmasked, n)
        loss = call.loss if call.loss is not None else stats.logprob.new_zeros(())
        dx = None if dx is None else _scatter(vocab.all_reduce(dx), unmasked, n)
    if any(needs_grad):
        loss = PrecomputedGradients.apply(loss, (dx, *weight_gradients), final_gradients, *parameters)
    return TokenLoss(loss, logprob_N, entropy_N, kl_N, call.sums)


def _run(
    stream: Stream, call: LossCalls, gradients: HeadGradients, chunk_rows: int, scope: Scope, needs_grad: bool
) -> RowStats:
    """Run `loss_fn` over all rows by its scope; return the statistics of all rows."""
    n = stream.targets.shape[0]
    if n == 0:
        call.infer_metric_names()
        return concatenate([], stream.hidden, with_reference=stream.reference is not None)
    chunks = even_chunks(n, chunk_rows)
    two_phases = scope == "batch"
    sequences: list[tuple[int, int] | None] = [None] * len(chunks)
    if scope == "sequence" and len(chunks) > 1:
        assert call.bounds is not None, "scope sequence without cu_seqlens passed the checks"
        aligned = sequence_chunks(call.bounds, chunk_rows)
        two_phases = aligned is None
        if aligned is not None:
            sequences = list(aligned)
            chunks = [(call.bounds[first], call.bounds[last]) for first, last in aligned]
    if two_phases and len(chunks) > 1:
        stats = stream.all_stats(chunks, with_entropy=True)
        upstream = call(stats, 0, n, None, needs_grad)
        if needs_grad:
            stream.recompute_gradients(gradients, chunks, stats, upstream)
        return stats
    chunk_stats = []
    for (start, stop), span in zip(chunks, sequences):
        chunk, stats = stream.stats_of(start, stop, with_entropy=True)
        upstream = call(stats, start, stop, span, needs_grad)
        if needs_grad:
            stream.add_gradients(gradients, chunk, stats, start, upstream)
        chunk_stats.append(stats)
    return concatenate(chunk_stats, stream.hidden)


def _unmasked_rows(row_mask: Tensor | None) -> Tensor | None:
    """Return the indices of the unmasked rows; None: all."""
    if row_mask is None:
        return None
    unmasked = row_mask.nonzero()[:, 0]
    return None if unmasked.numel() == row_mask.numel() else unmasked


def _scatter(values: Tensor, unmasked: Tensor | None, n: int) -> Tensor:
    """Scatter the values of unmasked rows into N rows of zeros."""
    if unmasked is None:
        return values
    return values.new_zeros(n, *values.shape[1:]).index_copy_(0, unmasked, values)


def _unmasked_before(row_mask: Tensor, bounds: list[int]) -> list[int]:
    """Return the number of unmasked rows before each row offset."""
    counts = torch.cumsum(row_mask, 0).cpu()
    return [0 if bound == 0 else int(counts[bound - 1]) for bound in bounds]
