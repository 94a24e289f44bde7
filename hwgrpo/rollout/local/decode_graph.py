"""The lean step as a device graph: on a fast device, launching a step takes longer than computing it.

A recording costs several steps. It is made only after tensors moved, because rows were dropped, buffers were doubled
(where no kernel attends) or prompts do not fit, and only if enough steps remain. A slot that is refilled changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from hwgrpo_backends.graphs import Recorder, Recording

from hwgrpo.errors import RunError
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.shared_prefix_attention import ParkedRow

WORTH_RECORDING = 15
"""Least number of remaining steps for which a recording is made."""

COMPACT_BELOW = 1 / 2
"""Share of unfinished rows at or below which finished rows are dropped: this costs a recording."""

FEW_ROWS = 32
"""Rows at or below which none are dropped: a step reads all weights, whether for one row or for this many."""


class RecordedRows:
    """Rows of the lean step, recorded and replayed; see `Rows` for the methods.

    Args:
        rows: nothing is prefilled yet, made with `fixed=True`.
        recorder: records operations as a device graph.
        worth_recording: least number of remaining steps for which a recording is made.
        on_failure: called with the reason when a recording fails; these rows are then decoded without. None: RunError.
    """

    refills = parks = True

    def __init__(
        self,
        rows: LeanRows,
        recorder: Recorder,
        worth_recording: int = WORTH_RECORDING,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._rows = rows
        self._recorder: Recorder | None = recorder
        self._on_failure = on_failure
        self._left = 0
        self._worth_recording = worth_recording
        self._recording: Recording | None = None
        self._token = torch.empty(0)
        self._count = 0

    @property
    def compact_below(self) -> float:
        return COMPACT_BELOW if self._count > FEW_ROWS else 0.0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        return self._rows.prefill(prompts)

    def free(self, numbers: list[int]) -> None:
        self._rows.free(numbers)

    def park(self, source: int, length: int) -> ParkedRow:
        return self._rows.park(source, length)

    def extend(self, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        return self._rows.extend(rows, sequences)

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        kept = source[source >= 0]
        if len(source) != self._count or not np.array_equal(kept, np.flatnonzero(source >= 0)):
            self.release()  # rows move: their memory is needed before the recording's is free by itself
        self._rows.arrange(source, left)
        self._count, self._left = len(source), int(left.max())

    def weights_changed(self) -> None:
        self._rows.weights_changed()

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        if self._rows.advance():
            self.release()
        if self._recording is not None:
            self._token.copy_(token_B)
        elif self._recorder is not None and self._left >= self._worth_recording:
            self._token = token_B.clone()
            self._recording = self._record(self._recorder)
        self._left -= 1
        if self._recording is None:
            return self._rows.compute(token_B)
        self._recording.replay()
        return self._recording.output

    def _record(self, recorder: Recorder) -> Recording | None:
        try:
            return recorder(lambda: self._rows.compute(self._token))
        except RuntimeError as error:
            # The context has the error that ended the recording: leaving it raises another. The device may not record
            # again.
            line = (str(error.__context__ or error).splitlines() or [""])[0]
            reason = (
                f"recording the decode step of {self._count} rows as a device graph failed ({line}): set "
                "rollout.graphs=false, or, if memory ran out, lower rollout.max_sequences"
            )
            if self._on_failure is None:
                raise RunError(reason) from error
        # The error held the tensors of the recording: they are free from here on.
        self._recorder = None
        self._on_failure(reason)
        return None

    def release(self) -> None:
        """Free the recording, if there is one, and its memory."""
        if self._recording is not None:
            self._recording.release()
            self._recording = None
