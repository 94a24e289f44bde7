"""The lean step as a device graph: on a fast device, asking for a token takes the host longer than it takes the device.

A recording costs several steps, so that few are made: whenever rows were dropped or the response buffers were doubled,
unless hardly anything is left to decode.
"""

from __future__ import annotations

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder, Recording

from hwgrpo.errors import RunError
from hwgrpo.rollout.local.lean_step import LeanRows

WORTH_RECORDING = 16
"""Steps that must be left for a recording to be made."""

COMPACT_BELOW = 1 / 2
"""Rows are dropped once this share or less is unfinished: it costs a recording."""

FEW_ROWS = 32
"""No fewer rows than these are worth one: a step reads all weights, whether for one row or for as many as these."""


class RecordedRows:
    """Rows of the lean step, recorded and replayed; see `Rows` for the methods.

    Args:
        rows: nothing computed yet, made with `fixed=True`.
        recorder: records work as a device graph.
        steps: most tokens that will be appended.
        worth_recording: steps that must be left for a recording to be made.
    """

    def __init__(self, rows: LeanRows, recorder: Recorder, steps: int, worth_recording: int = WORTH_RECORDING) -> None:
        self._rows = rows
        self._recorder = recorder
        self._left = steps
        self._worth_recording = worth_recording
        self._recording: Recording | None = None
        self._token = torch.empty(0)
        self._count = 0

    @property
    def compact_below(self) -> float:
        return COMPACT_BELOW if self._count > FEW_ROWS else 0.0

    def prefill(self) -> torch.Tensor:
        return self._rows.prefill()

    def spread(self, prompt_of: np.ndarray) -> None:
        self._rows.spread(prompt_of)
        self._count = len(prompt_of)

    def select(self, kept: np.ndarray) -> None:
        self.release()
        self._rows.select(kept)
        self._count = len(kept)

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        if self._rows.advance():
            self.release()
        if self._recording is None:
            if self._left < self._worth_recording:
                self._left -= 1
                return self._rows.compute(token_B)
            self._token = token_B.clone()
            self._recording = self._record()
        else:
            self._token.copy_(token_B)
        self._left -= 1
        self._recording.replay()
        return self._recording.output

    def _record(self) -> Recording:
        try:
            return self._recorder(lambda: self._rows.compute(self._token))
        except RuntimeError as error:
            # What ended a recording is in the context: leaving it fails in its turn. The device may not record again.
            line = (str(error.__context__ or error).splitlines() or [""])[0]
            raise RunError(
                f"recording the decode step of {self._count} rows as a device graph failed ({line}): set "
                "rollout.graphs=false, or, if memory ran out, lower rollout.max_sequences"
            ) from error

    def release(self) -> None:
        """Give up the recording, if there is one, and its memory."""
        if self._recording is not None:
            self._recording.release()
            self._recording = None
