"""The metrics as TensorBoard events."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoardLogger:
    """Writes each metric as a scalar to event files under `run_dir/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step and flush them, so that a killed process loses none."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only a run that logs pays

            _silence_writing_thread()
            _wait_for_next_name(self._folder)
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            self._purge_step = None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def cut_back(self, step: int) -> None:
        """Have TensorBoard forget every later step: the next event file opens with a mark that says so."""
        self.close()
        if self._folder.exists():
            self._purge_step = step + 1

    def close(self) -> None:
        """Close the event file; a later `log` starts another."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _wait_for_next_name(folder: Path) -> None:
    """Wait until a new event file sorts after those that are there: TensorBoard reads them in the order of their names.

    A name has the second of its making; within a second the order is that of process ids and a counter, as text.
    """
    seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
    while int(time.time()) == max(seconds, default=0):
        time.sleep(0.02)


@cache
def _silence_writing_thread() -> None:
    """Keep TensorBoard's thread from printing a traceback of what the next call raises anyway."""
    plain = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            plain(failure)

    threading.excepthook = hook
