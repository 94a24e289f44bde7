"""The sequences that a group of ranks computes together: gather them, and scatter the results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hwgrpo.training.policy.sequence_shard import SequenceGroup
from hwgrpo.values import TrainBatch


@dataclass(frozen=True)
class GroupBatch:
    """The sequences that a group of ranks computes together."""

    group: SequenceGroup
    batch: TrainBatch
    """The members' sequences, concatenated; each row of a trajectory is a sequence (`TrainBatch.by_rows`)."""
    sequences: Sequence[int]
    """Indices of the sequences to compute."""
    own_tokens: torch.Tensor
    """[r] int64: indices of this rank's response tokens in its own batch."""
    positions: torch.Tensor
    """[r] int64: indices of the same tokens in `batch`."""

    def scatter_back(self, values: torch.Tensor) -> torch.Tensor:
        """Return [r]: the values that the members computed for this rank's tokens.

        Args:
            values: [R], one per response token of `batch`; 0 where another member computed the value.
        """
        return self.group.sum(values)[self.positions]


def gather_group_batch(group: SequenceGroup, batch: TrainBatch, sequences: Sequence[int]) -> GroupBatch:
    """Gather the sequences that each member of a group needs computed, with all their columns.

    Args:
        group: this rank's group; a single rank keeps its batch.
        batch: this rank's sequences.
        sequences: indices of the sequences to compute.
    """
    wanted = torch.zeros(len(batch), dtype=torch.bool)
    wanted[torch.tensor(list(sequences), dtype=torch.int64)] = True
    own_tokens = batch.per_token_of(wanted).nonzero()[:, 0]
    if group.size == 1:
        rows = batch.by_rows()
        chosen = sequences if rows.trajectory is None else wanted[rows.trajectory].nonzero()[:, 0].tolist()
        return GroupBatch(group, rows, chosen, own_tokens, own_tokens)
    parts = group.gather(batch.select(wanted))
    first = sum(len(part.tokens) for part in parts[: group.rank])
    joined = TrainBatch.concat(parts).by_rows()
    return GroupBatch(group, joined, range(len(joined)), own_tokens, torch.arange(first, first + len(own_tokens)))
