"""The rewards of the steps of responses, for process supervision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepRewards:
    """The rewards of the K steps of S responses, ragged; every response has at least one step."""

    rewards: torch.Tensor
    """[K] fp64: weighted sums; meaningless where the response is not valid."""
    ends: torch.Tensor
    """[K] int64: index of a step's last token in its response, not descending; -1 in a response without tokens."""
    offsets: torch.Tensor
    """[S + 1] int64: the steps of response i are `offsets[i]:offsets[i + 1]`."""

    def of_responses(self, first: int, end: int) -> StepRewards:
        """Return the steps of responses `first` to `end`, as copies."""
        steps = slice(int(self.offsets[first]), int(self.offsets[end]))
        offsets = self.offsets[first : end + 1] - self.offsets[first]
        return StepRewards(self.rewards[steps].clone(), self.ends[steps].clone(), offsets)


def join_steps(ranks: Sequence[StepRewards]) -> StepRewards:
    """Concatenate the steps of all ranks' responses."""
    return StepRewards(
        torch.cat([steps.rewards for steps in ranks]),
        torch.cat([steps.ends for steps in ranks]),
        torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([steps.offsets.diff() for steps in ranks]).cumsum(0)]),
    )
