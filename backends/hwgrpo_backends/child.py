"""Run child processes with JSON output and a timeout, so that torch is imported there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass
class ChildOutput:
    """The JSON lines of a child process, and how it ended."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    """Why it failed: a signal, an exit status or the timeout; None if it did not."""
    timed_out: bool = False


def run_children(
    script: Path,
    requests: Sequence[Any],
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    *,
    marker: str,
    python: str = sys.executable,
) -> list[ChildOutput]:
    """Run `script` once per request in parallel, and return the outputs in order.

    Args:
        script: a file that reads its request as JSON from its first argument, and prints `marker` + JSON.
        timeout: seconds for all of them together; output until then is kept.
        marker: prefix of the JSON lines; plug-ins may print other lines.
        python: the interpreter.

    Raises:
        OSError: it cannot be run.
    """
    with start_children(script, requests, timeout, environ, marker=marker, python=python) as wait:
        return wait()


@contextmanager
def start_children(
    script: Path,
    requests: Sequence[Any],
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    *,
    marker: str,
    python: str = sys.executable,
) -> Iterator[Callable[[], list[ChildOutput]]]:
    """Start the children of `run_children`; yield a function that waits for their outputs; its call starts the timeout.

    Children that still run at the end of the block are killed, so unneeded output costs no time.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [_start(python, script, each, environ, Path(folder) / str(i)) for i, each in enumerate(requests)]

        def wait() -> list[ChildOutput]:
            end = time.monotonic() + timeout
            return [_finish(*each, max(0.0, end - time.monotonic()), timeout, marker) for each in running]

        try:
            yield wait
        finally:
            for child, out, err in running:
                _kill(child)
                out.close()
                err.close()


def _start(
    python: str, script: Path, request: Any, environ: Mapping[str, str], base: Path
) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    # Files, not pipes: a process left behind by a plug-in could keep a pipe open forever.
    out, err = base.with_suffix(".out").open("w+b"), base.with_suffix(".err").open("w+b")
    # -P keeps the script's own folder, whose modules have everyday names, off the child's sys.path; Python before 3.11,
    # which another environment may have, lacks it.
    options = ["-P"] if python == sys.executable else []
    command = [python, *options, str(script), json.dumps(request)]
    child = subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    )
    return child, out, err


def _finish(
    child: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], patience: float, limit: float, marker: str
) -> ChildOutput:
    output = ChildOutput()
    try:
        code = child.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        _kill(child)
        output.failure, output.timed_out = f"it took more than {limit:g} seconds", True
    else:
        if code:
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            output.failure = f"it ended with {end}: {_last_line(err)}"
    out.seek(0)
    for line in out.read().decode("utf-8", errors="replace").splitlines():
        if line.startswith(marker):
            try:
                output.lines.append(json.loads(line[len(marker) :]))
            except ValueError:  # cut off in the middle by the time limit
                continue
    return output


def _last_line(err: IO[bytes]) -> str:
    err.seek(0)
    lines = err.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "nothing on stderr"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its process group; do not wait for one that hangs inside a driver."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, and left nothing behind
        return
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return
