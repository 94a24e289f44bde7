"""Killing this process at a point of a run: at a line of the project's code, in whatever thread, or after a time."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import hwgrpo

PACKAGE = str(Path(hwgrpo.__file__).parent)
PLACES = {
    "anywhere": ("",),
    "checkpoints": ("training/checkpoint",),
    "logs": ("observe/",),
    "the end": ("training/finish", "models/loading", "observe/summary", "training/run_folder"),
}
"""Starts of the paths of the files whose lines count."""
OF_AGENTS = {"episodes": ("agents/", "rollout/workflow", "rollout/turn_template", "rollout/local/decode_session")}
"""Those of runs with trajectories of several turns."""
ALL = PLACES | OF_AGENTS


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(seconds: float) -> None:
    """Die so many seconds from now."""
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def kill_at(place: str, number: int) -> None:
    """Die at the given line of a place, counted from now on over all threads."""
    counted = itertools.count(1)

    def at_line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and next(counted) == number:
            die()
        return at_line

    _trace(lambda file: at_line if _is_in(file, place) else None)


def count_lines(counts: Counter[str]) -> None:
    """Count the lines of every place from now on."""

    def counting(file: str) -> Any:
        places = [place for place in ALL if _is_in(file, place)]

        def at_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                counts.update(places)
            return at_line

        return at_line if places else None

    _trace(counting)


def _trace(local: Any) -> None:
    known: dict[str, Any] = {}

    def at_call(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in known:
            known[file] = local(file)
        return known[file]

    threading.settrace(at_call)
    sys.settrace(at_call)


def _is_in(file: str, place: str) -> bool:
    return file.startswith(PACKAGE) and file[len(PACKAGE) + 1 :].startswith(ALL[place])
