"""Whether the local engine records its decode step, and the fallback where a recording fails."""

from __future__ import annotations

import sys

import torch
from hwgrpo_backends.device import Device
from hwgrpo_backends.graphs import Recorder
from transformers import PreTrainedModel

from hwgrpo.errors import RunError
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.kernel_fallback import DecodeKernels
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.support.text import terminal_line


def graph_recorder(graphs: bool | None, device: Device, *, deterministic: bool) -> Recorder | None:
    """Return the device's recorder if decode steps are to be recorded.

    Args:
        graphs: `rollout.graphs`.
        device: the training device.
        deterministic: `trainer.deterministic`.
    """
    if graphs is None:
        graphs = device.backend.graphs_by_default and not deterministic
    return device.recorder if graphs else None


class DecodeGraphs:
    """Records decode steps until a recording fails.

    Args:
        recorder: makes device graphs; None: nothing is recorded.
        required: a recording that fails raises a RunError; otherwise decoding goes on without device graphs.
    """

    def __init__(self, recorder: Recorder | None, required: bool) -> None:
        self._recorder = recorder
        self._required = required
        self.note = ""
        """Why decode steps are not recorded although there is a recorder; empty: they are."""

    @property
    def active(self) -> bool:
        """Whether decode steps are recorded."""
        return self._recorder is not None

    def check(self, model: PreTrainedModel, device: torch.device, kernels: DecodeKernels) -> None:
        """Record nothing from here on if recordings of a few decode steps fail or give other logits.

        Kernels with which they do are not used from here on, if recordings are right without.
        """
        if self._recorder is None:
            return
        reason, error = self._recorded_excess(model, device, self._recorder, kernels=kernels.active)
        if reason is not None and kernels.active:
            without, error = self._recorded_excess(model, device, self._recorder, kernels=False)
            if without is None:
                kernels.stop(f"recorded as a device graph, {reason}")
                return
        if error is not None and self._required:
            raise error
        if reason is not None:
            self._stop(reason)

    @staticmethod
    def _recorded_excess(
        model: PreTrainedModel, device: torch.device, recorder: Recorder, *, kernels: bool
    ) -> tuple[str | None, RunError | None]:
        """Return why recordings must not be used, or None, and the error if they failed."""
        try:
            return check_lean_step(model, device, recorder, kernels=kernels), None
        except RunError as error:
            return str(error), error

    def rows(self, rows: LeanRows) -> RecordedRows:
        """Return rows, made with `fixed=True`, whose decode steps are recorded."""
        assert self._recorder is not None
        return RecordedRows(rows, self._recorder, on_failure=None if self._required else self._report_failure)

    def _stop(self, reason: str) -> None:
        self._recorder = None
        self.note = f"rollout decodes without device graphs: {reason}"

    def _report_failure(self, reason: str) -> None:
        self._stop(reason)
        print(terminal_line(f"hwgrpo: {self.note}"), file=sys.stderr, flush=True)
