"""What the closing summary remembers of a run: a few running sums, filled step by step or from metrics.jsonl."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.observe.shown_fields import (
    KL,
    LOSS,
    REWARD,
    TOKENS,
    TRUNCATED,
    VALIDATION_LOSS,
    Field,
    number,
    rows_text,
    validation_errors,
    validation_numbers,
)
from hwgrpo.observe.timing import PREFIX

ENDS = 5
"""Steps at each end of a run over which the reward is averaged; half of them all where there are fewer than twice as
many, so that no step is in both."""


class Ends:
    """The finite values of one metric in the first and in the last steps of a run."""

    def __init__(self) -> None:
        self.count = 0
        """Steps with a value."""
        self._first: list[float] = []
        self._last: list[float] = []

    def add(self, value: float) -> None:
        """Append the value of a later step."""
        self.count += 1
        self._first = [*self._first, value][:ENDS]
        self._last = [*self._last, value][-ENDS:]

    @property
    def size(self) -> int:
        """Steps in each of `first` and `last`: at most 5, and no step in both."""
        return min(ENDS, self.count // 2)

    @property
    def first(self) -> list[float]:
        """[size] oldest first."""
        return self._first[: self.size]

    @property
    def last(self) -> list[float]:
        """[size] oldest first; of a single step that step."""
        return self._last[-max(1, self.size) :]


@dataclass(frozen=True)
class Measured:
    """One validation of one metric."""

    value: float
    step: int
    error: float | None
    """Standard error over the prompts; None where it was not logged."""


class RunHistory:
    """Running sums over the steps and validations of a run, in order.

    Args:
        largest_kl: clamp of a token's KL to the reference; None: no clamp.
    """

    def __init__(self, largest_kl: float | None = None) -> None:
        self.largest_kl = largest_kl
        self.last_step = 0
        self.tokens = 0.0
        self.seconds: dict[str, float] = {}
        """stage -> seconds; `step` is the full step."""
        self.before: dict[tuple[str, str], float] = {}
        """Validation before the first step."""
        self.before_error: dict[tuple[str, str], float] = {}
        """Its standard errors over the prompts, where they were logged."""
        self.after: dict[tuple[str, str], float] = {}
        """The latest validation since ..."""
        self.after_error: dict[tuple[str, str], float] = {}
        self.after_step: int | None = None
        """... and the step it was made at."""
        self.best: dict[tuple[str, str], Measured] = {}
        """The highest validation since, the earliest of equal ones."""
        self.ends: dict[Field, Ends] = {field: Ends() for field in (REWARD, KL, TRUNCATED, LOSS)}
        """First and last values of the verdict's metrics."""
        self.validation_losses: dict[int, float] = {}
        """Step -> validation loss, in supervised training."""
        self.validation_rows: str | None = None
        """How many rows the latest validation read of how many; None: all."""

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the metrics of a step or of a validation."""
        self.last_step = max(self.last_step, step)
        self.tokens += TOKENS.read(values) or 0.0
        for name, value in values.items():
            took = number(value)
            if name.startswith(PREFIX) and took is not None:
                stage = name.removeprefix(PREFIX)
                self.seconds[stage] = self.seconds.get(stage, 0.0) + took
        self._add_validation(step, values)
        self.validation_rows = rows_text(values) or self.validation_rows
        loss = VALIDATION_LOSS.read(values)
        if loss is not None and math.isfinite(loss):
            self.validation_losses[step] = loss
        for field, ends in self.ends.items():
            read = field.read(values)
            if read is not None and math.isfinite(read):
                ends.add(read)

    def _add_validation(self, step: int, values: Mapping[str, Any]) -> None:
        measured, errors = validation_numbers(values), validation_errors(values)
        if step == 0:
            self.before.update(measured)
            self.before_error.update(errors)
            return
        self.after.update(measured)
        self.after_error.update(errors)
        if measured:
            self.after_step = step
        for key, value in measured.items():
            if key not in self.best or value > self.best[key].value:
                self.best[key] = Measured(value, step, errors.get(key))

    @property
    def is_supervised(self) -> bool:
        """Whether the run has losses and no rewards."""
        return not self.ends[REWARD].count and bool(self.ends[LOSS].count or self.validation_losses)

    @property
    def reward_steps(self) -> int:
        """Steps that each of `first_reward` and `last_reward` is the mean of."""
        return max(1, self.ends[REWARD].size)

    @property
    def first_reward(self) -> float | None:
        """Mean reward of the first steps; None before there are later ones to compare with."""
        first = self.ends[REWARD].first
        return statistics.fmean(first) if first else None

    @property
    def last_reward(self) -> float | None:
        """Mean reward of the last steps; None before any."""
        last = self.ends[REWARD].last
        return statistics.fmean(last) if last else None

    @property
    def training_seconds(self) -> float:
        """Seconds spent in stages: the steps, and what their stages do not cover."""
        stages = sum(took for stage, took in self.seconds.items() if stage != "step")
        return max(stages, self.seconds.get("step", 0.0))
