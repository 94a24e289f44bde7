"""The protocol of what shows a run, and the ways that need no terminal: a line per step, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hwgrpo.observe.shown_fields import (
    ACCURACY,
    ENTROPY,
    KL,
    LENGTH,
    LOSS,
    REWARD,
    THROUGHPUT,
    duration,
    validation_texts,
)
from hwgrpo.observe.summary import plain_summary
from hwgrpo.support.text import terminal_line, terminal_lines

if TYPE_CHECKING:
    from hwgrpo.observe.completions import Sample

RECENT_STEPS = 20


class Progress(Protocol):
    """A way to show a run."""

    def begin(self, step: int, rewards: Sequence[float] = ()) -> None:
        """Report that the run continues after `step` (0: a new run), with the mean rewards of the steps so far."""
        ...

    def step(self, step: int, values: Mapping[str, Any], sample: Sample | None) -> None:
        """A step is done."""
        ...

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """A validation is done."""
        ...

    def note(self, text: str) -> None:
        """Something else that a person should know."""
        ...

    def warning(self, text: str) -> None:
        """Show a warning about unhealthy metrics, several lines."""
        ...

    def summary(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; show what came of it."""
        ...

    def close(self) -> None:
        """Give the terminal back."""
        ...


class Silence:
    """Shows nothing."""

    def begin(self, step: int, rewards: Sequence[float] = ()) -> None: ...

    def step(self, step: int, values: Mapping[str, Any], sample: Sample | None) -> None: ...

    def validation(self, step: int, values: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def summary(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Pace:
    """How fast the recent steps went, and so when the last one will be done."""

    total: int
    """Steps of the run."""
    marks: tuple[tuple[int, float], ...] = ()
    """(step, seconds on the clock) of the recent steps, oldest first."""

    def mark(self, step: int, now: float) -> Pace:
        """Return the pace after `step` was reached at `now`."""
        return Pace(self.total, (*self.marks, (step, now))[-RECENT_STEPS - 1 :])

    def remaining(self, now: float) -> float | None:
        """Return the seconds left, counted from `now`; None before a step was timed."""
        if len(self.marks) < 2:
            return None
        (first, start), (last, end) = self.marks[0], self.marks[-1]
        if last <= first:
            return None
        return max(0.0, (end - start) / (last - first) * (self.total - last) - (now - end))


class PlainLines:
    """Prints one line per `log_every` steps.

    Args:
        total_steps: steps of the run.
        log_every: steps between lines; the last step always has one.
        stream: where to; standard output when None.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        total_steps: int,
        log_every: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._log_every = log_every
        self._stream = stream or sys.stdout
        self._clock = clock
        self._pace = Pace(total_steps)
        # Columns start this wide and widen with the widest number so far, so that lines stay aligned.
        self._widths = {"reward": 5, "loss": 5, "kl": 5, "len": 3, "entropy": 4, "accuracy": 5, "tok/s": 6, "eta": 4}

    def begin(self, step: int, rewards: Sequence[float] = ()) -> None:
        self._pace = self._pace.mark(step, self._clock())

    def step(self, step: int, values: Mapping[str, Any], sample: Sample | None) -> None:
        now = self._clock()
        self._pace = self._pace.mark(step, now)
        if step % self._log_every and step != self._total:
            return
        supervised = REWARD.read(values) is None and LOSS.read(values) is not None
        shown = {"loss": LOSS} if supervised else {"reward": REWARD, "kl": KL}
        scores = ACCURACY.read(values) is not None  # of a reward model
        of_model = {"accuracy": ACCURACY} if scores else {"len": LENGTH, "entropy": ENTROPY}
        columns = {
            **{name: each.show(values) for name, each in shown.items()},
            **{name: each.show(values) for name, each in of_model.items()},
            "tok/s": THROUGHPUT.show(values),
            "eta": duration(self._pace.remaining(now)),
        }
        cells = [self._step_cell(step)]
        for name, text in columns.items():
            self._widths[name] = max(self._widths[name], len(text))
            cells.append(f"{name} {text:>{self._widths[name]}}")
        self._print("  ".join(cells))

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        for text in validation_texts(values):
            self._print(terminal_line(f"{self._step_cell(step)}  validation {text}"))

    def note(self, text: str) -> None:
        self._print(terminal_lines(text))

    def warning(self, text: str) -> None:
        self._print(text)

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._print(plain_summary(summary))

    def close(self) -> None: ...

    def _step_cell(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
