"""A vocabulary-parallel head: each rank has a shard of consecutive rows of the weight, and all rows of tokens.

A rank runs the row ops on its own logits. The statistics of a full row follow from the chain rule: with w_r the
probability that the row's token lies in rank r's shard, and lp_r, H_r the statistics within that shard,

    ln p_y = lp_owner + ln w_owner        H = sum_r w_r (H_r - ln w_r)        w_r = e^(y_r) / sum_q e^(y_q)
    y_r = ln sum_j e^(z'_j - m), j on rank r, m the maximum over all ranks = f (m_r - m) + log_sum_r

and, with v_r the reference's w_r, KL = sum_r w_r (KL_r + ln w_r - ln v_r). ln p_y has no cancellation: it is a sum of
two numbers <= 0, each accurate near 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .logit_map import LogitMap
from .matrices import weighted
from .streaming import ReferenceStats, RowKernels, RowStats


def combine_shards(shards: list[RowStats], owner_R: Tensor, mapping: LogitMap) -> RowStats:
    """Return the statistics of full rows from those of each shard.

    Args:
        shards: per rank, in rank order, the outputs of `row_stats` on its shard of R rows. The logprob of a rank
            without the row's target is ignored. Entropies are empty if not requested.
        owner_R: [R] rank whose shard has the target.
        mapping: scale, and row_scale [R] or None, passed to `row_stats`.

    Returns:
        Statistics [R] as `row_stats` computes them from all logits, bitwise equal on every rank.
    """
    logprob_GR, max_GR, log_sum_GR = (torch.stack([shard.outputs()[field] for shard in shards]) for field in (0, 2, 3))
    index = owner_R[None]
    ln_w, row_max, log_sum = _masses(max_GR, log_sum_GR, mapping)
    entropy = shards[0].entropy
    if entropy.shape == row_max.shape:
        # e^smallest is 0, and 0 * smallest is 0, where 0 * -inf is not
        within = torch.stack([shard.entropy for shard in shards])
        entropy = (ln_w.exp() * (within - ln_w.clamp(min=torch.finfo(row_max.dtype).min))).sum(0)
    stats = RowStats(logprob_GR.gather(0, index)[0] + ln_w.gather(0, index)[0], entropy, row_max, log_sum)
    references = [shard.reference for shard in shards if shard.reference is not None]
    if references:
        stats = stats._replace(reference=_combine_references(references, ln_w, logprob_GR, index, mapping))
    return stats


def _combine_references(
    shards: list[ReferenceStats], ln_w: Tensor, logprob_GR: Tensor, index: Tensor, mapping: LogitMap
) -> ReferenceStats:
    """Return the reference statistics of full rows; `index` [1,R] is the rank whose shard has the target."""
    kl_GR, others_GR, logprob_ref_GR, max_GR, log_sum_GR = (torch.stack(each) for each in zip(*shards))
    ref_ln_w, ref_max, ref_log_sum = _masses(max_GR, log_sum_GR, mapping)
    gap = ln_w - ref_ln_w
    without_target = torch.ones_like(kl_GR).scatter(0, index, -torch.expm1(logprob_GR.gather(0, index)))
    others_GR = torch.where(torch.arange(len(shards), device=kl_GR.device)[:, None] == index, others_GR, kl_GR)
    return ReferenceStats(
        kl=weighted(ln_w.exp(), kl_GR + gap).sum(0),
        kl_others=weighted(ln_w.exp(), others_GR + weighted(without_target, gap)).sum(0),
        ref_logprob=logprob_ref_GR.gather(0, index)[0] + ref_ln_w.gather(0, index)[0],
        ref_max=ref_max,
        ref_log_sum=ref_log_sum,
    )


def _masses(max_GR: Tensor, log_sum_GR: Tensor, mapping: LogitMap) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln w [G,R] of each shard, and row_max and log_sum [R] of full rows."""
    smallest = torch.finfo(max_GR.dtype).min
    row_max = max_GR.amax(0)
    distance = (max_GR - row_max) * mapping.scale
    if mapping.row_scale_N is not None:
        distance = distance * mapping.row_scale_N.to(distance.dtype)
    shard_log_sum = (distance + log_sum_GR).masked_fill(
        max_GR <= smallest, -torch.inf
    )  # no token of the shard can be drawn
    # logsumexp without the largest term: ln w of a shard with nearly all the probability stays accurate
    largest, argmax = shard_log_sum.max(0, keepdim=True)
    relative = shard_log_sum - largest.clamp(min=smallest)
    others = relative.exp().scatter(0, argmax, 0.0).sum(0).log1p()
    return relative - others, row_max, (largest[0] + others).masked_fill(row_max <= smallest, 0.0)


class VocabShard:
    """This rank's shard of the vocabulary.

    Args:
        sizes: rows of the head on each rank, in rank order.
        rank: this one.
        group: the process group; None: this rank has the full vocabulary.
        device: device of the rows.
    """

    def __init__(self, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.sizes, self.rank, self.group = list(sizes), rank, group
        self.first = sum(self.sizes[:rank])
        self._ends = torch.tensor(self.sizes, device=device).cumsum(0)

    @property
    def total(self) -> int:
        """V of the full head."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Rows of the largest shard, from which every rank computes the same chunk size."""
        return max(self.sizes)

    def kernels(self, local: RowKernels) -> RowKernels:
        """Return row ops on this rank's logits [R,V_r] with targets and statistics of full rows [R,V].

        `stats` is a collective: all ranks call it for the same rows in the same order. `grad` is not.
        """
        if self.group is None:
            return local

        def combine(own: tuple[Tensor, ...], targets: Tensor, mapping: LogitMap) -> tuple[Tensor, ...]:
            stats = combine_shards(self._all_gather(RowStats.from_outputs(own)), self._owner(targets), mapping)
            outside = (targets < 0) | (targets >= self.total)  # NaN, as in the row ops
            row_max, ref_max = stats.row_max, stats.reference and stats.reference.ref_max
            return tuple(
                each
                if each is row_max or each is ref_max or each.shape != outside.shape
                else each.masked_fill(outside, torch.nan)
                for each in stats.outputs()
            )

        def stats(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, ...]:
            return combine(local.stats(logits, self._local(targets), *options), targets, LogitMap(*options[:3]))

        def stats_kl(logits: Tensor, ref_logits: Tensor, targets: Tensor, *mapping: Any) -> tuple[Tensor, ...]:
            assert local.stats_kl is not None, "reference logits without the row ops that read them"
            own = local.stats_kl(logits, ref_logits, self._local(targets), *mapping)
            return combine(own, targets, LogitMap(*mapping))

        def grad(logits: Tensor, targets: Tensor, *row: Any) -> Tensor:
            return self._gradient(local.grad, (logits,), targets, row)

        def grad_kl(logits: Tensor, ref_logits: Tensor, targets: Tensor, *row: Any) -> Tensor:
            assert local.grad_kl is not None, "reference logits without the row ops that read them"
            return self._gradient(local.grad_kl, (logits, ref_logits), targets, row)

        return RowKernels(stats, grad, stats_kl, grad_kl)

    def _gradient(
        self, row_grad: Callable[..., Tensor], logits: tuple[Tensor, ...], targets: Tensor, row: tuple[Any, ...]
    ) -> Tensor:
        """Call a gradient op on this rank's logits [R,V_r]; `row` has the arguments after the targets, `out` last."""
        *rest, out = row
        index = self._local(targets)
        column = index[:, None]
        # If the target is on another rank, the op still treats the column at `index` as the target. The right value for
        # that column comes from the same op on two copies of the logit, the first in the role of the target.
        pairs = [each.gather(1, column).repeat(1, 2) for each in logits]
        out = row_grad(*logits, index, *rest, out)
        pair = row_grad(*pairs, torch.zeros_like(index), *rest, torch.empty_like(pairs[0]))
        has_target = (self._owner(targets) == self.rank)[:, None]
        return out.scatter_(1, column, torch.where(has_target, out.gather(1, column), pair[:, 1:].to(out.dtype)))

    def all_reduce(self, partial_NH: Tensor) -> Tensor:
        """Return the sum over all ranks, accumulated in fp32 at least; may overwrite `partial_NH`."""
        if self.group is None:
            return partial_NH
        total = partial_NH.to(torch.promote_types(partial_NH.dtype, torch.float32))
        dist.all_reduce(total, group=self.group)
        return total.to(partial_NH.dtype)

    def _owner(self, targets: Tensor) -> Tensor:
        """Return the rank whose shard has each target; any rank for an invalid target."""
        return torch.bucketize(targets, self._ends, right=True).clamp(max=len(self.sizes) - 1)

    def _local(self, targets: Tensor) -> Tensor:
        """Return the targets as columns of this rank's logits; any column for other targets."""
        return (targets - self.first).clamp(0, self.sizes[self.rank] - 1)

    def _all_gather(self, own: RowStats) -> list[RowStats]:
        """Return the statistics of all ranks, in one collective."""
        outputs = list(own.outputs())
        indices = [index for index, each in enumerate(outputs) if each.shape == own.row_max.shape]
        sent = torch.stack([outputs[index] for index in indices])
        received = [torch.empty_like(sent) for _ in self.sizes]
        dist.all_gather(received, sent, group=self.group)
        stats = []
        for each in received:
            for index, values in zip(indices, each):
                outputs[index] = values
            stats.append(RowStats.from_outputs(outputs))
        return stats
