"""Stages that profile steps (`trainer.profile_steps`) by torch's profiler; they change nothing of the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from hwgrpo_backends.device import Device

from hwgrpo.observe.kernel_table import kernel_table, longest_kernels
from hwgrpo.training.stages.stage import StepState

FOLDER = "profiles"
"""A run's folder with its profiled steps."""


@dataclass
class StepProfile:
    """What the stages of a profile share: the profiler of the step in work.

    A trace has an event per operation of the host and per kernel of the device: some hundred megabytes of memory for a
    step of a long rollout, and a tenth of it on disk.

    Args:
        steps: those to profile.
        output: the run's folder.
        device: the training device.
        rank: of this process; only rank 0 has one.
    """

    steps: list[int]
    output: Path
    device: Device
    rank: int = 0
    _profiler: torch.profiler.profile | None = field(default=None, init=False)

    def begin(self, state: StepState) -> None:
        """Start the profiler, if the step is to be profiled."""
        if self.rank or state.step not in self.steps:
            return
        self.device.synchronize()
        self._profiler = torch.profiler.profile()  # of the host and of the device that torch has
        self._profiler.start()

    def end(self, state: StepState) -> None:
        """Stop it and write the trace and the table of kernels; no disk costs the profile and not the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.device.synchronize()
        profiler.stop()
        folder = self.output / FOLDER / f"step_{state.step:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
            (folder / "kernels.txt").write_text(kernel_table(longest_kernels(profiler)), encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            state.notes.append(f"warning: the profile of step {state.step} could not be written: {reason}")
            return
        state.notes.append(f"profiled step {state.step}: {folder}")

    def close(self) -> None:
        """Stop the profiler of a step that has ended the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


@dataclass
class BeginProfile:
    """Starts the profile of a step."""

    timed = None
    profile: StepProfile

    def __call__(self, state: StepState) -> None:
        self.profile.begin(state)


@dataclass
class EndProfile:
    """Ends the profile of a step and writes it."""

    timed = None
    profile: StepProfile

    def __call__(self, state: StepState) -> None:
        self.profile.end(state)
