"""Warnings about unhealthy metrics: each is reported once, and again when it gets worse or returns after long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.observe.detectors import DETECTORS, WATCHED, Detector
from hwgrpo.observe.series import MetricSeries
from hwgrpo.support.jsonlines import StepLines
from hwgrpo.support.text import terminal_line

if TYPE_CHECKING:
    from hwgrpo.config import Config

FILE = "warnings.jsonl"
WORSE = 2.0
"""Growth of a warning's severity since its last report that makes it worth reporting again."""
AGAIN_STEPS = 20
"""Steps before a worse sign is reported again: while it grows, it would be reported every few steps."""
CLEAR_STEPS = 50
"""Steps without a sign after which its return is news; fewer, and it only wavers about its threshold."""


@dataclass(frozen=True)
class RunWarning:
    """A warning that metrics look unhealthy."""

    step: int
    name: str
    """One of `detectors.DETECTORS`."""
    seen: str
    """What was seen: the numbers and the steps."""
    meaning: str
    """What it may mean."""
    remedies: tuple[str, ...]
    """What to try; settings are named as in the config."""

    @property
    def text(self) -> str:
        """What a person is shown, several lines."""
        return "\n".join(
            [
                f"warning at step {self.step}, {self.name}: {terminal_line(self.seen)}",
                f"  {terminal_line(self.meaning)}",
                *(f"  - {terminal_line(remedy)}" for remedy in self.remedies),
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return what warnings.jsonl and summary.json hold: `{step, name, seen, meaning, remedies}`."""
        return {
            "step": self.step,
            "name": self.name,
            "seen": self.seen,
            "meaning": self.meaning,
            "remedies": list(self.remedies),
        }


@dataclass
class _Reported:
    severity: float
    """Severity at the last report."""
    step: int
    """Step of the last report."""
    last_sign: int
    """The last step with the sign."""


class Monitor:
    """Watches the metrics of a run step by step; a function of those and the settings alone, so a replay agrees.

    Args:
        config: the settings of the run, which advice refers to.
        detectors: name -> detector.
    """

    def __init__(self, config: Config, detectors: Mapping[str, Detector] = DETECTORS) -> None:
        self._config = config
        self._detectors = detectors
        self._series = MetricSeries(WATCHED)
        self._reported: dict[str, _Reported] = {}
        self.warnings: list[RunWarning] = []
        """All reported warnings, oldest first."""

    def add(self, step: int, values: Mapping[str, Any]) -> list[RunWarning]:
        """Add the metrics of the next step and return the warnings to report now.

        Args:
            step: step number, from 1.
            values: its metrics.
        """
        self._series.add(step, values)
        new = []
        for name, detect in self._detectors.items():
            finding = detect(self._series, self._config)
            if finding is None:
                continue
            reported = self._reported.get(name)
            if reported is None or _is_news(reported, step, finding.severity):
                reported = self._reported[name] = _Reported(finding.severity, step, step)
                new.append(RunWarning(step, name, finding.seen, finding.meaning, finding.remedies))
            reported.last_sign = step
        self.warnings += new
        return new


def _is_news(reported: _Reported, step: int, severity: float) -> bool:
    worse = severity >= WORSE * reported.severity and step - reported.step >= AGAIN_STEPS
    return worse or step - reported.last_sign > CLEAR_STEPS


class WarningsLog:
    """Appends warnings to `run_dir/warnings.jsonl`, a line each."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = StepLines(run_dir / FILE)

    def log(self, warning: RunWarning) -> None:
        """Append one warning."""
        self._lines.append(warning.record())

    def cut_back(self, step: int) -> None:
        """Remove the warnings of every later step."""
        self._lines.cut_back(step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
