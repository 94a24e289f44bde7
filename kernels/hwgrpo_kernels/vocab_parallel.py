"""A vocabulary-parallel head: each rank has some consecutive rows of the weight, and all have all rows of tokens.

A rank runs the row ops on its own logits. What they say of a whole row follows from the chain rule: with w_r the
probability that the row's token lies in the rank's part of the vocabulary, and lp_r, H_r what rank r found within it,

    ln p_y = lp_owner + ln w_owner        H = sum_r w_r (H_r - ln w_r)        w_r = e^(y_r) / sum_q e^(y_q)
    y_r = ln sum_j e^(z'_j - m), j on rank r, m the maximum over all ranks = f (m_r - m) + log_sum_r

where no term cancels another: ln p_y is a sum of two numbers <= 0, each exact to the last digits near 0.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .logit_map import LogitMap
from .streaming import RowKernels, RowStats


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
    logprob_GR, max_GR, log_sum_GR = (torch.stack([part[field] for part in parts]) for field in (0, 2, 3))
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
    ln_w = relative - others
    index = owner_R[None]
    logprob = logprob_GR.gather(0, index)[0] + ln_w.gather(0, index)[0]
    log_sum = (largest[0] + others).masked_fill(row_max <= smallest, 0.0)
    if parts[0].entropy.shape != row_max.shape:
        return RowStats(logprob, parts[0].entropy, row_max, log_sum)
    # e^smallest is 0, and 0 * smallest is 0, where 0 * -inf is not
    within = torch.stack([part.entropy for part in parts])
    entropy = (ln_w.exp() * (within - ln_w.clamp(min=smallest))).sum(0)
    return RowStats(logprob, entropy, row_max, log_sum)


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

        def stats(
            logits: Tensor, targets: Tensor, scale: float, squash: float, row_scale: Tensor | None, with_entropy: bool
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            mine = RowStats(*local.stats(logits, self._local(targets), scale, squash, row_scale, with_entropy))
            return combine(self._gather(mine), self._owner(targets), LogitMap(scale, squash, row_scale))

        def grad(
            logits: Tensor, targets: Tensor, logprob: Tensor, entropy: Tensor | None, row_max: Tensor, log_sum: Tensor,
            grad_logprob: Tensor, grad_entropy: Tensor | None, scale: float, squash: float, row_scale: Tensor | None,
            out: Tensor,
        ) -> Tensor:  # fmt: skip
            row = logprob, entropy, row_max, log_sum, grad_logprob, grad_entropy, scale, squash, row_scale
            index = self._local(targets)
            column = index[:, None]
            # Where the target is on another rank, `row_grad` takes the column at `index` for it all the same. What
            # belongs there is found by the same op from two copies of that logit, the first playing the target.
            pair = logits.gather(1, column).repeat(1, 2)
            out = local.grad(logits, index, *row, out)
            pair = local.grad(pair, torch.zeros_like(index), *row, pair)
            has_target = (self._owner(targets) == self.rank)[:, None]
            return out.scatter_(1, column, torch.where(has_target, out.gather(1, column), pair[:, 1:].to(out.dtype)))

        return RowKernels(stats, grad)

    def sum(self, partial_NH: Tensor) -> Tensor:
        """Return the sum over all ranks (a collective), in fp32 at least on the way; may overwrite `partial_NH`."""
        if self.group is None:
            return partial_NH
        total = partial_NH.to(torch.promote_types(partial_NH.dtype, torch.float32))
        dist.all_reduce(total, group=self.group)
        return total.to(partial_NH.dtype)

    def _owner(self, targets: Tensor) -> Tensor:
        """Return the rank that has each target."""
        return torch.bucketize(targets, self._ends, right=True)

    def _local(self, targets: Tensor) -> Tensor:
        """Return the targets as columns of this rank's logits; what is not among them, as some column."""
        return (targets - self.first).clamp(0, self.sizes[self.rank] - 1)

    def _gather(self, mine: RowStats) -> list[RowStats]:
        """Return the statistics of all ranks, in one collective."""
        wanted = [each for each in mine if each.shape == mine.row_max.shape]
        sent = torch.stack(wanted)
        received = [torch.empty_like(sent) for _ in self.sizes]
        dist.all_gather(received, sent, group=self.group)
        if len(wanted) == len(mine):
            return [RowStats(*each.unbind()) for each in received]
        return [RowStats(each[0], mine.entropy, each[1], each[2]) for each in received]
