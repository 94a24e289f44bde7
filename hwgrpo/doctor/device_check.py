"""Tier 2: every device of the chosen backend computes something, in a child process of its own, and is compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hwgrpo_backends import Backend

from hwgrpo.doctor import child_environment

SCRIPT = Path(__file__).with_name("device_check_child.py")
LIMIT = 300.0
"""Seconds per device: kernels are compiled when they first run."""
RANKS = 2


@dataclass(frozen=True)
class Trial:
    """What one trial on one device came to."""

    device: str
    what: str
    state: Literal["PASS", "FAIL", "SKIP"]
    told: str


def run_trials(
    backend: Backend, devices: int, limit: float = LIMIT, environ: Mapping[str, str] = os.environ
) -> list[Trial]:
    """Try every device of `backend`, one after the other, then two ranks together.

    Args:
        backend: the chosen one.
        devices: how many of its devices this process could use.
        limit: seconds that one device, or the ranks together, may take.
        environ: of the children.
    """
    trials = []
    for index in range(1 if backend.is_host else devices):
        trials += _try_device(backend, index, limit, environ)
    return trials + _try_ranks(backend, devices, limit, environ)


def _try_device(backend: Backend, index: int, limit: float, environ: Mapping[str, str]) -> list[Trial]:
    question = {"backend": backend.name, "index": index, "what": "device"}
    (answer,) = child_environment.ask(SCRIPT, [question], limit, environ)
    return _read(answer, backend.name if backend.is_host else f"{backend.name}:{index}", "start")


def _try_ranks(backend: Backend, devices: int, limit: float, environ: Mapping[str, str]) -> list[Trial]:
    name = f"{backend.name} x {RANKS}"
    if not backend.is_host and devices < RANKS:
        return [Trial(name, "all-reduce", "SKIP", f"needs {RANKS} devices, this process sees {devices}")]
    with tempfile.TemporaryDirectory() as folder:
        common = {"backend": backend.name, "what": "ranks", "world": RANKS, "store": f"{folder}/store"}
        answers = child_environment.ask(
            SCRIPT, [{**common, "index": r, "rank": r} for r in range(RANKS)], limit, environ
        )
    trials = [trial for answer in answers for trial in _read(answer, name, "all-reduce")]
    return [next((trial for trial in trials if trial.state == "FAIL"), trials[0])]


def _read(answer: child_environment.ChildOutput, device: str, first: str) -> list[Trial]:
    """Return the trials of one child; the one it was in when it ended before its time has failed."""
    trials = [Trial(device, line["what"], line["state"], line["told"]) for line in answer.lines if "what" in line]
    begun = [line["begun"] for line in answer.lines if "begun" in line]
    if answer.trouble or not trials:
        unfinished = begun[-1] if len(begun) > len(trials) else first if not begun else "end"
        trials.append(Trial(device, unfinished, "FAIL", answer.trouble or "it said nothing"))
    return trials
