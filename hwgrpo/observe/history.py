"""What the closing summary remembers of a run: a few running sums, filled step by step or from metrics.jsonl."""

import statistics
from collections.abc import Mapping
from typing import Any

from hwgrpo.observe.fields import REWARD, TOKENS, number
from hwgrpo.observe.progress import validation_numbers
from hwgrpo.observe.timing import PREFIX

ENDS = 5
"""Steps at each end of a run over which the reward is averaged; half of them all where there are fewer than twice as
many, so that no step is in both."""


class RunHistory:
    """Running sums over the steps and validations of a run, in order."""

    def __init__(self) -> None:
        self.last_step = 0
        self.tokens = 0.0
        self.seconds: dict[str, float] = {}
        """stage -> seconds; `step` is the whole of a step."""
        self.before: dict[tuple[str, str], float] = {}
        """Validation before the first step."""
        self.after: dict[tuple[str, str], float] = {}
        """The latest validation since ..."""
        self.after_step: int | None = None
        """... and the step it was made at."""
        self._rewarded_steps = 0
        self._first_rewards: list[float] = []
        self._last_rewards: list[float] = []

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Take in the metrics of a step or of a validation."""
        self.last_step = max(self.last_step, step)
        self.tokens += TOKENS.read(values) or 0.0
        for name, value in values.items():
            took = number(value)
            if name.startswith(PREFIX) and took is not None:
                stage = name.removeprefix(PREFIX)
                self.seconds[stage] = self.seconds.get(stage, 0.0) + took
        measured = validation_numbers(values)
        (self.before if step == 0 else self.after).update(measured)
        if measured and step > 0:
            self.after_step = step
        reward = REWARD.read(values)
        if reward is not None:
            self._rewarded_steps += 1
            self._first_rewards = [*self._first_rewards, reward][:ENDS]
            self._last_rewards = [*self._last_rewards, reward][-ENDS:]

    @property
    def reward_steps(self) -> int:
        """Steps that each of `first_reward` and `last_reward` is the mean of."""
        return min(ENDS, max(1, self._rewarded_steps // 2))

    @property
    def first_reward(self) -> float | None:
        """Mean reward of the first steps; None before there are later ones to compare with."""
        return statistics.fmean(self._first_rewards[: self.reward_steps]) if self._rewarded_steps > 1 else None

    @property
    def last_reward(self) -> float | None:
        """Mean reward of the last steps; None before any."""
        return statistics.fmean(self._last_rewards[-self.reward_steps :]) if self._last_rewards else None

    @property
    def training_seconds(self) -> float:
        """Seconds spent in stages: the steps, and what their stages do not cover."""
        stages = sum(took for stage, took in self.seconds.items() if stage != "step")
        return max(stages, self.seconds.get("step", 0.0))
