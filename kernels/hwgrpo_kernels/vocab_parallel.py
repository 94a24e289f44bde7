"""A vocabulary-parallel head: each rank has some consecutive rows of the weight, and all have all rows of tokens.

A rank runs the row ops on its own logits. What they say of a whole row follows from the chain rule: with w_r the
probability that the row's token lies in the rank's part of the vocabulary, and lp_r, H_r what rank r found within it,

    ln p_y = lp_owner + ln w_owner        H = sum_r w_r (H_r - ln w_r)        w_r = e^(y_r) / sum_q e^(y_q)
    y_r = ln sum_j e^(z'_j - m), j on rank r, m the maximum over all ranks = f (m_r - m) + log_sum_r

and, with v_r the same of a reference, KL = sum_r w_r (KL_r + ln w_r - ln v_r). No term of ln p_y cancels another: it is
a sum of two numbers <= 0, each exact to the last digits near 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .logit_map import LogitMap
from .matrices import weighted
from .streaming import BesideStats, RowKernels, RowStats


def combine(parts: list[RowStats], owner_R: Tensor, mapping: LogitMap) -> RowStats:
    """Return the statistics of whole rows from those of their parts.

    Args:
        parts: per rank, in rank order, what `row_stats` says of its part of R rows. A rank that does not have a row's
            target may say anything of its logprob. Entropies have no elements where they are not wanted.
        owner_R: [R] rank that has the target.
        mapping: scale, and row_scale [R] or None, that `row_stats` was given.

    Returns:
        Statistics [R] as `row_stats` would give for all logits at once, the same bits on every rank.
    """
    logprob_GR, max_GR, log_sum_GR = (torch.stack([part.outputs()[field] for part in parts]) for field in (0, 2, 3))
    index = owner_R[None]
    ln_w, row_max, log_sum = _masses(max_GR, log_sum_GR, mapping)
    entropy = parts[0].entropy
    if entropy.shape == row_max.shape:
        # e^smallest is 0, and 0 * smallest is 0, where 0 * -inf is not
        within = torch.stack([part.entropy for part in parts])
        entropy = (ln_w.exp() * (within - ln_w.clamp(min=torch.finfo(row_max.dtype).min))).sum(0)
    whole = RowStats(logprob_GR.gather(0, index)[0] + ln_w.gather(0, index)[0], entropy, row_max, log_sum)
    beside = [part.beside for part in parts if part.beside is not None]
    if beside:
        whole = whole._replace(beside=_combine_beside(beside, ln_w, logprob_GR, index, mapping))
    return whole


def _combine_beside(
    parts: list[BesideStats], ln_w: Tensor, logprob_GR: Tensor, index: Tensor, mapping: LogitMap
) -> BesideStats:
    """Return what is found beside whole rows; `index` [1,R] is the rank that has the target."""
    kl_GR, others_GR, logprob_ref_GR, max_GR, log_sum_GR = (torch.stack(each) for each in zip(*parts))
    ref_ln_w, ref_max, ref_log_sum = _masses(max_GR, log_sum_GR, mapping)
    gap = ln_w - ref_ln_w
    without_target = torch.ones_like(kl_GR).scatter(0, index, -torch.expm1(logprob_GR.gather(0, index)))
    others_GR = torch.where(torch.arange(len(parts), device=kl_GR.device)[:, None] == index, others_GR, kl_GR)
    return BesideStats(
        kl=weighted(ln_w.exp(), kl_GR + gap).sum(0),
        kl_others=weighted(ln_w.exp(), others_GR + weighted(without_target, gap)).sum(0),
        ref_logprob=logprob_ref_GR.gather(0, index)[0] + ref_ln_w.gather(0, index)[0],
        ref_max=ref_max,
        ref_log_sum=ref_log_sum,
    )


def _masses(max_GR: Tensor, log_sum_GR: Tensor, mapping: LogitMap) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln w [G,R] of each part, and row_max and log_sum [R] of whole rows, from those of the parts."""
    smallest = torch.finfo(max_GR.dtype).min
    row_max = max_GR.amax(0)
    distance = (max_GR - row_max) * mapping.scale
    if mapping.row_scale_N is not None:
        distance = distance * mapping.row_scale_N.to(distance.dtype)
    part_log_sum = (distance + log_sum_GR).masked_fill(max_GR <= smallest, -torch.inf)  # nothing there can be drawn
    # ln sum exp with the largest term kept apart: ln w of a part that has nearly everything keeps its digits
    largest, which = part_log_sum.max(0, keepdim=True)
    relative = part_log_sum - largest.clamp(min=smallest)
    others = relative.exp().scatter(0, which, 0.0).sum(0).log1p()
    return relative - others, row_max, (largest[0] + others).masked_fill(row_max <= smallest, 0.0)


class VocabShard:
    """This rank's part of the vocabulary.

    Args:
        sizes: rows of the head on each rank, in rank order.
        rank: this one.
        group: the process group; None where this rank has the whole vocabulary.
        device: that of the rows.
    """

    def __init__(self, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.sizes, self.rank, self.group = list(sizes), rank, group
        self.first = sum(self.sizes[:rank])
        self._ends = torch.tensor(self.sizes, device=device).cumsum(0)

    @property
    def total(self) -> int:
        """V of the whole head."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """The largest part, from which every rank takes the same number of rows per chunk."""
        return max(self.sizes)

    def kernels(self, local: RowKernels) -> RowKernels:
        """Return row ops on this rank's logits [R,V_r] whose targets and statistics are those of whole rows [R,V].

        `stats` is a collective: all ranks call it for the same rows in the same order. `grad` is not.
        """
        if self.group is None:
            return local

        def whole(mine: tuple[Tensor, ...], targets: Tensor, mapping: LogitMap) -> tuple[Tensor, ...]:
            stats = combine(self._gather(RowStats.of(mine)), self._owner(targets), mapping)
            outside = (targets < 0) | (targets >= self.total)  # NaN, as the row ops say of these
            row_max, ref_max = stats.row_max, stats.beside and stats.beside.ref_max
            return tuple(
                each
                if each is row_max or each is ref_max or each.shape != outside.shape
                else each.masked_fill(outside, torch.nan)
                for each in stats.outputs()
            )

        def stats(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, ...]:
            return whole(local.stats(logits, self._local(targets), *options), targets, LogitMap(*options[:3]))

        def stats_kl(logits: Tensor, ref_logits: Tensor, targets: Tensor, *mapping: Any) -> tuple[Tensor, ...]:
            assert local.stats_kl is not None, "reference logits without the row ops that read them"
            mine = local.stats_kl(logits, ref_logits, self._local(targets), *mapping)
            return whole(mine, targets, LogitMap(*mapping))

        def grad(logits: Tensor, targets: Tensor, *row: Any) -> Tensor:
            return self._gradient(local.grad, (logits,), targets, row)

        def grad_kl(logits: Tensor, ref_logits: Tensor, targets: Tensor, *row: Any) -> Tensor:
            assert local.grad_kl is not None, "reference logits without the row ops that read them"
            return self._gradient(local.grad_kl, (logits, ref_logits), targets, row)

        return RowKernels(stats, grad, stats_kl, grad_kl)

    def _gradient(
        self, row_grad: Callable[..., Tensor], logits: tuple[Tensor, ...], targets: Tensor, row: tuple[Any, ...]
    ) -> Tensor:
        """Call a gradient op on this rank's logits [R,V_r]; `row` is what follows the targets, `out` last."""
        *rest, out = row
        index = self._local(targets)
        column = index[:, None]
        # Where the target is on another rank, the op takes the column at `index` for it all the same. What belongs
        # there is found by the same op from two copies of that logit, the first playing the target.
        pairs = [each.gather(1, column).repeat(1, 2) for each in logits]
        out = row_grad(*logits, index, *rest, out)
        pair = row_grad(*pairs, torch.zeros_like(index), *rest, torch.empty_like(pairs[0]))
        has_target = (self._owner(targets) == self.rank)[:, None]
        return out.scatter_(1, column, torch.where(has_target, out.gather(1, column), pair[:, 1:].to(out.dtype)))

    def sum(self, partial_NH: Tensor) -> Tensor:
        """Return the sum over all ranks (a collective), in fp32 at least on the way; may overwrite `partial_NH`."""
        if self.group is None:
            return partial_NH
        total = partial_NH.to(torch.promote_types(partial_NH.dtype, torch.float32))
        dist.all_reduce(total, group=self.group)
        return total.to(partial_NH.dtype)

    def _owner(self, targets: Tensor) -> Tensor:
        """Return the rank that has each target; some rank for what is no target."""
        return torch.bucketize(targets, self._ends, right=True).clamp(max=len(self.sizes) - 1)

    def _local(self, targets: Tensor) -> Tensor:
        """Return the targets as columns of this rank's logits; what is not among them, as some column."""
        return (targets - self.first).clamp(0, self.sizes[self.rank] - 1)

    def _gather(self, mine: RowStats) -> list[RowStats]:
        """Return the statistics of all ranks, in one collective."""
        outputs = list(mine.outputs())
        wanted = [index for index, each in enumerate(outputs) if each.shape == mine.row_max.shape]
        sent = torch.stack([outputs[index] for index in wanted])
        received = [torch.empty_like(sent) for _ in self.sizes]
        dist.all_gather(received, sent, group=self.group)
        told = []
        for each in received:
            for index, values in zip(wanted, each):
                outputs[index] = values
            told.append(RowStats.of(outputs))
        return told
