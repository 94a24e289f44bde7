"""The prompts of each step, in the same order on any number of ranks and resumable at any step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwgrpo.data.prompts import PromptDataset
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.values import PromptBatch


@dataclass
class PromptSource:
    """Returns this rank's share of each step's prompts.

    Every rank draws the same rows and keeps a slice of each update: its prompts are the same on any number of ranks.
    """

    dataset: PromptDataset
    sampler: PromptSampler
    prompts_per_step: int
    prompts_per_update: int
    rank: int
    world_size: int

    def next(self) -> PromptBatch:
        """Return this rank's prompts of the next step."""
        drawn = self.sampler.take(self.prompts_per_step)
        share = self.prompts_per_update // self.world_size
        mine = [
            drawn[update + self.rank * share + i]
            for update in range(0, self.prompts_per_step, self.prompts_per_update)
            for i in range(share)
        ]
        return PromptBatch(tuple(self.dataset.prompt(row, epoch) for epoch, row in mine))

    def draw(self, count: int) -> tuple[PromptBatch, int]:
        """Draw `count` prompts over all ranks; return this rank's, contiguous, and how many they are.

        A rank without any gets one that another has: ranks may share an engine, and then generate together.
        """
        drawn = self.sampler.take(count)
        first, end = (count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        mine = drawn[first:end] or drawn[:1]
        return PromptBatch(tuple(self.dataset.prompt(row, epoch) for epoch, row in mine)), end - first

    def state(self) -> dict[str, Any]:
        """Return the position in the data, as JSON values."""
        return self.sampler.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position; see `PromptSampler.restore`."""
        self.sampler.restore(state)
