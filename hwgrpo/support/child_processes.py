"""Child processes: the hash seed they share, and the end of all descendants, in any process group or session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

FIXED_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of an interpreter in which the order of a set is the same in every process and after a restart."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl."""
PAUSE_SECONDS = 0.005


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends; no effect outside of Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of living descendants, parents first; none without /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    ids = [ancestor]
    for each in ids:
        ids += children.get(each, ())
    return ids[1:]


def end_descendants(seconds: float) -> None:
    """Kill every descendant of this process, waiting up to `seconds`; call `adopt_orphans` first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for each in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        reap()
        if not _has_children():
            return
        time.sleep(PAUSE_SECONDS)


def reap() -> dict[int, int]:
    """Return id -> wait status of the children that have ended since the last call."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
