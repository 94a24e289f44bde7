"""All processes below one: found through their parents, so that leaving its group or session hides none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl."""
PAUSE_SECONDS = 0.005


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends; outside of Linux nothing changes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Return the living processes below one, parents first; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found = [ancestor]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def end_descendants(seconds: float) -> None:
    """End every process below this one, which has adopted orphans; one that cannot be ended takes so long at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for each in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        reap()
        if not _has_children():
            return
        time.sleep(PAUSE_SECONDS)


def reap() -> dict[int, int]:
    """Return number and wait status of the children of this process that have ended since the last time."""
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
