"""`Step`: metrics, responses and validation of a finished step, as its observer logged them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.own_copies import own_copy

if TYPE_CHECKING:
    import torch

    from hwgrpo.observe.completions import Sample
    from hwgrpo.observe.observer import Observer
    from hwgrpo.values import Completions, PromptBatch, Rewards, StepMetrics


@dataclass(eq=False)
class Step:
    """A finished step."""

    step: int
    """Its number, from 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its metrics, by their names in metrics.jsonl; over all ranks."""
    validation: dict[str, float] | None = None
    """Metrics of the validation after this step; None if there was none."""
    saved: Path | None = None
    """Folder of this step's checkpoint, which may still be written in the background; None if there is none."""
    records: Callable[[], list[dict[str, Any]]] = field(default=list, repr=False)
    """Makes `completions`."""

    @cached_property
    def completions(self) -> list[dict[str, Any]]:
        """This rank's responses, each as in completions.jsonl: prompt, response, reward, rewards, advantage, ..."""
        return self.records()


class StepRecorder:
    """An observer that also keeps what is logged of the last step.

    Args:
        observer: shows and logs it.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._step = Step(0)
        self.validations: dict[int, dict[str, float]] = {}
        """Step -> its validation metrics."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def step(self, metrics: StepMetrics, sample: Sample | None = None) -> None:
        """Log a finished step and keep its metrics."""
        self._step = Step(metrics.step, dict(metrics.values))
        self._observer.step(metrics, sample)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log a validation and keep its metrics."""
        self.validations[step] = dict(values)
        self._observer.validation(step, values)

    def completions(
        self,
        step: int,
        batch: PromptBatch,
        completions: Completions,
        rewards: Rewards,
        advantages_S: torch.Tensor,
        dropped: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Log the responses of a step and keep them until the next."""
        from hwgrpo.observe.completions import step_records

        recorded = (step, batch, completions, rewards, advantages_S, dropped)
        self._step.records = lambda: [own_copy(record) for record in step_records(*recorded)]
        self._observer.completions(step, batch, completions, rewards, advantages_S, dropped)

    def last(self, saved: Path | None) -> Step:
        """Return what was logged of the last step.

        Args:
            saved: folder of its checkpoint.
        """
        self._step.validation = self.validations.get(self._step.step)
        self._step.saved = saved
        return self._step
