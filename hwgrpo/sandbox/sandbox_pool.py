"""The trainer's pool of sandbox workers: distribution of programs, deadlines, restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hwgrpo
from hwgrpo.errors import RewardError
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.protection import LEVELS, describe, levels_to_try, parts_of, refusal, require_first_part
from hwgrpo.support.child_processes import FIXED_HASHES
from hwgrpo.support.framed_messages import Reader, frame_message
from hwgrpo.support.scratch import ScratchFolder

ROOT = str(Path(hwgrpo.__file__).parents[1])
START_SECONDS = 60.0
"""Seconds for a worker to start and to run its first program."""
GRACE_SECONDS = 15.0
"""Seconds of a worker beyond the limits of its runs, to start, end and clean up."""
END_SECONDS = 6.0
MOST_STARTS = 3
"""Workers that may end in a row before they are ready."""
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from hwgrpo.sandbox.sandbox_worker import main; "
    "main(*map(int, sys.argv[2:5]))"
)


def site_packages_folders() -> list[str]:
    """Return the folders in which this process's Python has its installed packages."""
    paths = sysconfig.get_paths()
    return sorted({os.path.realpath(paths[name]) for name in ("purelib", "platlib")})


class _Refused(Exception):
    """A worker cannot have the level."""


class _Worker:
    """The trainer's handle of one worker."""

    def __init__(self, level: str, limits: Limits, folder: str, packages: Sequence[str]) -> None:
        self.folder = folder
        self.job: int | None = None
        self.ready: dict[str, Any] | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self._reader = Reader()
        self._outgoing = memoryview(b"")
        requests, self._requests = os.pipe()
        self.replies, replies = os.pipe()
        life, self._life = os.pipe()
        ends = (requests, replies, life)
        os.mkdir(folder, 0o711)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _BOOT, ROOT, *map(str, ends)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=ends,
                start_new_session=True,
                cwd="/",
                env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **FIXED_HASHES},
            )
        finally:
            for each in ends:
                os.close(each)
        os.set_blocking(self._requests, False)
        os.set_blocking(self.replies, False)
        setup: dict[str, Any] = {"level": level, "parts": parts_of(level), "limits": dataclasses.asdict(limits)}
        setup["hidden"] = [part for part in LEVELS[level] if part not in setup["parts"]]
        self.send({**setup, "folder": folder, "root": ROOT, "packages": packages})

    @property
    def sending(self) -> int | None:
        """The descriptor for unsent bytes; None when all are sent."""
        return self._requests if self._outgoing else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, as much of it as the pipe takes now; tests follow it, for a process that has nothing else."""
        tests = b""
        if "tests" in message:
            tests = json.dumps(message["tests"]).encode()
            message = {"tests_bytes": len(tests), **{key: message[key] for key in message if key != "tests"}}
        self._outgoing = memoryview(frame_message(json.dumps(message).encode()) + tests)
        self.flush()

    def flush(self) -> None:
        """Write unsent bytes until the pipe is full."""
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outgoing = memoryview(b"")  # it is dead, which `receive` reports

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; raise EOFError at the end, or at bytes that are none."""
        try:
            chunk = os.read(self.replies, 1 << 20)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        try:
            return list(self._reader.feed(chunk))
        except ValueError as error:
            raise EOFError from error

    def close(self) -> None:
        """End the worker and all its processes."""
        if self._life < 0:
            return
        os.close(self._life)
        self._life = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the supervisor itself was killed or stopped
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        os.close(self._requests)
        os.close(self.replies)


class SandboxPool:
    """Workers that run programs; each program runs in new processes without access to others.

    Args:
        level: a protection level, or auto.
        limits: of each run.
        workers: number of programs that run at the same time.
        site_packages: programs may import the packages that are installed in this process's Python, e.g. numpy.

    Raises:
        ConfigError: this host does not allow the level.
    """

    def __init__(self, level: str, limits: Limits, workers: int, *, site_packages: bool = False) -> None:
        self.limits, self._size = limits, workers
        self._packages = site_packages_folders() if site_packages else []
        self.replaced = 0
        """Number of workers that ended or hung, and were replaced."""
        self._scratch = ScratchFolder("hwgrpo-sandbox-")
        os.chmod(self._scratch.path, 0o711)
        self._workers: list[_Worker] = []
        self._number = 0
        self._closing = weakref.finalize(self, _close, self._workers, os.getpid())
        self.level, first = self._open_first(level)
        ready: dict[str, Any] = first.ready or {}
        self.parts: tuple[str, ...] = tuple(ready["parts"])
        """What programs are confined by: of namespaces, seccomp, landlock."""
        self.description = describe(self.level, ready["missing"])
        """A line for the user: the level, and what this host lacks."""

    def run(self, jobs: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Run programs.

        Args:
            jobs: each {"source", "inputs": texts} or {"source", "tests": as for `tests_process.run_tests`}.

        Returns:
            Per job the results of its runs, as `Runner.run_script` or `run_functions` returns them. There may be fewer
            runs than inputs, after one that was too slow; a program that ended its worker has one run of reason killed.

        Raises:
            RewardError: no worker can be started any more.
        """
        assert self._closing.alive, "the pool is closed"
        results: dict[int, list[dict[str, Any]]] = {}
        queued = deque(range(len(jobs)))
        failed_starts = 0
        try:
            while len(results) < len(jobs):
                busy = sum(worker.job is not None for worker in self._workers)
                while len(self._workers) < min(self._size, busy + len(queued)):
                    self._start(self.level)
                for worker in self._workers:
                    if queued and worker.ready and worker.job is None:
                        worker.job = queued.popleft()
                        worker.deadline = time.monotonic() + self._seconds(jobs[worker.job])
                        worker.send({"number": worker.job, **jobs[worker.job]})
                for worker, ended in self._wait(results):
                    if worker.job is not None:
                        results[worker.job] = [{"reason": "killed", "detail": ended, "stdout": "", "outcomes": []}]
                    failed_starts = 0 if worker.ready else failed_starts + 1
                    if failed_starts >= MOST_STARTS:
                        raise RewardError(f"reward code: {failed_starts} workers of the sandbox ended as they started")
                    self._replace(worker)
        finally:
            for worker in [each for each in self._workers if each.job is not None]:
                self._replace(worker)
        return [results[number] for number in range(len(jobs))]

    def close(self) -> None:
        """End the workers."""
        self._closing()
        self._scratch.remove()

    def _seconds(self, job: Mapping[str, Any]) -> float:
        return GRACE_SECONDS + (self.limits.seconds + 1) * len(job.get("inputs", (0,)))

    def _start(self, level: str) -> _Worker:
        self._number += 1
        worker = _Worker(level, self.limits, f"{self._scratch.path}/{self._number}", self._packages)
        self._workers.append(worker)
        return worker

    def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.close()
        self.replaced += 1

    def _open_first(self, level: str) -> tuple[str, _Worker]:
        reasons: dict[str, str] = {}
        for each in levels_to_try(level):
            reason = require_first_part(each)
            if reason is None:
                worker = self._start(each)
                try:
                    while worker.ready is None:
                        for _, ended in self._wait({}):
                            raise _Refused(ended)
                    return each, worker
                except _Refused as refused:
                    reason = str(refused)
                    self._workers.remove(worker)
                    worker.close()
            reasons[each] = reason
        self._closing()
        raise refusal(level, reasons)

    def _wait(self, results: dict[int, list[dict[str, Any]]]) -> list[tuple[_Worker, str]]:
        """Wait for workers; store results; return the workers that ended, or are too late, and how."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.replies, select.POLLIN)
            if worker.sending is not None:
                poll.register(worker.sending, select.POLLOUT)
        active = [worker.deadline for worker in self._workers if worker.job is not None or not worker.ready]
        left = max(0.0, min(active, default=math.inf) - time.monotonic())
        able = {number for number, _ in poll.poll(min(left, 1.0) * 1000)}
        ended = []
        for worker in self._workers:
            if worker.sending in able:
                worker.flush()
            try:
                if worker.replies in able:
                    for message in worker.receive():
                        self._store(worker, message, results)
            except (EOFError, _Refused) as end:
                ended.append((worker, str(end) or "its worker ended"))
                continue
            if worker.deadline < time.monotonic():
                ended.append((worker, "its worker did not reply in time"))
        return ended

    def _store(self, worker: _Worker, message: dict[str, Any], results: dict[int, list[dict[str, Any]]]) -> None:
        if worker.ready is None:
            if "ready" not in message:
                raise _Refused(str(message.get("refused")))
            worker.ready = message["ready"]
        elif worker.job is not None and message.get("number") == worker.job:
            results[worker.job] = message["runs"]
            worker.job = None
        else:
            raise EOFError("its worker sent an invalid reply")
        worker.deadline = math.inf


def _close(workers: list[_Worker], owner: int) -> None:
    """End the workers; a fork of the trainer must not."""
    if os.getpid() == owner:
        for worker in workers:
            worker.close()
        workers.clear()
