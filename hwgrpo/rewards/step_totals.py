"""The weighted sums of the rewards of steps over reward functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hwgrpo.errors import RewardError
from hwgrpo.ragged import offsets_of
from hwgrpo.rewards.failure_policy import FunctionValues
from hwgrpo.step_rewards import StepRewards
from hwgrpo.values import Completions

if TYPE_CHECKING:
    from hwgrpo.rewards.response_steps import StepFinder


class StepTotals:
    """Sums the rewards of the steps of a batch's responses over reward functions.

    A list that a function returns has a reward for each step; one number is the reward of the last step.
    """

    def __init__(self, finder: StepFinder, completions: Completions) -> None:
        responses = zip(completions.texts, completions.token_lists(), strict=True)
        self._ends = [finder.token_ends(text, tokens) for text, tokens in responses]
        self.counts = [len(ends) for ends in self._ends]
        """Number of steps of each response."""
        self._sums = [[0.0] * count for count in self.counts]
        self._listed = self._failed = False

    def add(self, result: FunctionValues, setting: Any) -> None:
        """Add the rewards of one function."""
        self._listed |= bool(result.steps)
        self._failed |= bool(result.failures)
        numbers = torch.where(result.replaced, setting.failure_value, result.values.nan_to_num(0.0)).tolist()
        for sample, (sums, number) in enumerate(zip(self._sums, numbers, strict=True)):
            for step, reward in enumerate(result.steps.get(sample, ())):
                sums[step] += setting.weight * reward
            if sample not in result.steps:
                sums[-1] += setting.weight * number

    def rewards(self, valid: torch.Tensor) -> StepRewards:
        """Return the sums; 0 where `valid` [S] is False.

        Raises:
            RewardError: no function returned a list for any response, though none failed.
        """
        if self.counts and not self._listed and not self._failed:
            raise RewardError(
                "algorithm.advantage.name=process needs the rewards of steps, but every reward function returned one "
                "number per response; return a list with one number for each step, or use grpo"
            )
        kept = valid.tolist()
        sums = [reward if ok else 0.0 for ok, steps in zip(kept, self._sums, strict=True) for reward in steps]
        return StepRewards(
            torch.tensor(sums, dtype=torch.float64),
            torch.tensor([end for ends in self._ends for end in ends], dtype=torch.int64),
            offsets_of(torch.tensor(self.counts, dtype=torch.int64)),
        )
