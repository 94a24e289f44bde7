"""Runs of programs by a worker: the processes of each, its deadline, its output, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from hwgrpo.sandbox import namespaces, program_process, tests_process
from hwgrpo.sandbox.confinement import Confinement
from hwgrpo.sandbox.plain_values import HEADER
from hwgrpo.sandbox.scratch_files import empty_folder, exceeds
from hwgrpo.support.child_processes import end_descendants, reap

POLL_SECONDS = 0.1
"""Interval of checks of the scratch folder's size, while a program writes nothing."""
END_POLL_SECONDS = 0.001
END_SECONDS = 5.0
"""Seconds for all processes of a program to end after SIGKILL."""
STDERR_BYTES = 2000
"""End of stderr that is kept, and read for the reason of an error."""
UNCONFINED_CODE = 78
"""Exit code of a child that could not be confined, and ran nothing."""


class Runner:
    """Runs programs, one at a time, each in new processes with an empty scratch folder.

    Args:
        confinement: of the programs.
        folder: of this worker, for scratch folders where there are no namespaces.
    """

    def __init__(self, confinement: Confinement, folder: str) -> None:
        self._confinement, self._limits = confinement, confinement.limits
        self._isolated = "namespaces" in confinement.parts
        self._scratch = namespaces.SCRATCH if self._isolated else f"{folder}/scratch"
        self._null = os.open("/dev/null", os.O_RDWR)

    def run_script(self, source: str, text: str) -> dict[str, Any]:
        """Run a program with an input.

        Args:
            source: of the program.
            text: its standard input.

        Returns:
            `stdout`; `stderr`, its end; `reason`: "" where it ended well, else error, timeout, memory, output or
            killed; `detail`.
        """
        stdin = os.memfd_create("stdin")
        try:
            with open(stdin, "wb", closefd=False) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
            os.lseek(stdin, 0, os.SEEK_SET)
            return self._script(source, stdin)
        finally:
            os.close(stdin)

    def _script(self, source: str, stdin: int) -> dict[str, Any]:
        with _Run(self) as run:
            stdout, stderr = run.pipe(), run.pipe()
            main = run.start([stdin, stdout.write, stderr.write], lambda: program_process.run_script(source))
            reason = run.watch(main)
        reason, detail = (reason, "") if reason else _reason(run.ended.get(main, 0), stderr.content)
        texts = {"stdout": stdout.content, "stderr": stderr.content[-STDERR_BYTES:]}
        return {name: text.decode("utf-8", "replace") for name, text in texts.items()} | {
            "reason": reason,
            "detail": detail,
        }

    def run_functions(self, source: str, pipe: int, size: int) -> dict[str, Any]:
        """Run a program, and tests that call its functions.

        Args:
            source: of the program.
            pipe: descriptor from which the tests are moved to their process when the program has its own: neither the
                program's process nor its parent ever has them in memory.
            size: bytes of the tests, JSON as for `tests_process.run_tests`.

        Returns:
            `outcomes` of the tests that ended: passed, failed, error, memory; `reason` and `detail` of the run's end.
        """
        with _Run(self) as run:
            stdout, stderr, verdicts = run.pipe(), run.pipe(), run.pipe()
            asks, replies = run.link(), run.link()
            program = run.start(
                [self._null, stdout.write, stderr.write, asks[0], replies[1]],
                lambda: program_process.serve_functions(source),
            )
            tests = _move_to_memory(pipe, size)
            main = run.start(
                [tests, self._null, self._null, verdicts.write, asks[1], replies[0]], tests_process.run_tests
            )
            os.close(tests)
            reason = run.watch(main)
        results = list(_frames(verdicts.content))
        outcomes = [each["outcome"] for each in results if each["outcome"] != "ended"]
        detail = next((each["detail"] for each in results if each.get("detail")), "")
        if not reason and (len(outcomes) < len(results) or not results):
            reason, detail = _reason(run.ended.get(program, 0), stderr.content)
            reason = reason or "error"
        return {"outcomes": outcomes, "reason": reason, "detail": detail}

    def _open_scratch(self) -> None:
        if self._isolated:
            namespaces.mount_scratch(self._limits.scratch_mib, self._limits.scratch_files, self._confinement.user or 0)
            return
        os.mkdir(self._scratch, 0o700)
        if self._confinement.user is not None:
            os.chown(self._scratch, self._confinement.user, self._confinement.user)

    def _close_scratch(self) -> None:
        if self._isolated:
            namespaces.unmount_scratch()
            return
        empty_folder(self._scratch)
        os.rmdir(self._scratch)

    def _scratch_exceeds(self) -> bool:
        if self._isolated:
            return False  # its file system has the limits
        return exceeds(self._scratch, self._limits.scratch_mib << 20, self._limits.scratch_files)

    def _end_all(self, started: Sequence[int]) -> dict[int, int]:
        """Kill all processes of a program; return number -> wait status of those that were started here."""
        if self._isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all of this pid namespace but its first process, which this is
        ended = {}
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if not self._isolated and self._confinement.user is not None:
            self._kill_user(self._confinement.user)
        for each in started:
            with contextlib.suppress(ChildProcessError):
                ended[each] = os.waitpid(each, 0)[1]
        reap()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            end_descendants(END_SECONDS)
        return ended

    def _kill_user(self, user: int) -> None:
        """Kill all processes of the user of programs at once, so that none can start another meanwhile."""
        if "seccomp" in self._confinement.parts:
            return  # a program cannot start any
        kill_user(user)


def kill_user(user: int) -> None:
    """Kill all processes of a user who has no others; needs root."""
    assert user > 0, "root's processes are those of the host"
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class _Pipe:
    """A pipe from a program, and what arrived."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.content = bytearray()
        self.open = True

    def receive(self) -> None:
        """Store the bytes that have arrived."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.read, 1 << 16)
            self.content += chunk
            self.open = bool(chunk)


class _Run:
    """The processes and pipes of one run; at the end none of them is left."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pipes: list[_Pipe] = []
        self._links: list[int] = []
        self._started: list[int] = []
        self.ended: dict[int, int] = {}
        """Number of a process -> its wait status."""

    def __enter__(self) -> _Run:
        self._runner._open_scratch()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_inner()
        self.ended |= self._runner._end_all([each for each in self._started if each not in self.ended])
        for pipe in self._pipes:
            while pipe.open and len(pipe.content) <= self._most:
                before = len(pipe.content)
                pipe.receive()
                if len(pipe.content) == before:
                    break
            os.close(pipe.read)
        self._runner._close_scratch()

    @property
    def _most(self) -> int:
        return self._runner._limits.output_kib << 10

    def pipe(self) -> _Pipe:
        """Return a pipe that this process reads."""
        self._pipes.append(_Pipe())
        return self._pipes[-1]

    def link(self) -> tuple[int, int]:
        """Return the descriptors, to read and to write, of a pipe between two processes of the run."""
        ends = os.pipe()
        self._links += ends
        return ends

    def start(self, descriptors: Sequence[int], main: Callable[[], NoReturn]) -> int:
        """Start a confined process with these descriptors; return its number."""
        child = os.fork()
        if child == 0:
            code = UNCONFINED_CODE
            try:
                self._runner._confinement.apply(descriptors, self._runner._scratch)
                code = 1
                main()
            except OSError as error:
                if code == UNCONFINED_CODE:
                    os.write(2, str(error).encode())
            finally:
                os._exit(code)
        self._started.append(child)
        return child

    def watch(self, main: int) -> str:
        """Wait for the end of a process, or stop early; return why: timeout, output, or "" at its end."""
        self._close_inner()
        deadline = time.monotonic() + self._runner._limits.seconds
        poll = select.poll()
        by_number = {pipe.read: pipe for pipe in self._pipes}
        for number in by_number:
            poll.register(number, select.POLLIN)
        checked = time.monotonic()
        while True:
            number, status = os.waitpid(main, os.WNOHANG)
            if number:
                self.ended[main] = status
                return ""
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now - checked >= POLL_SECONDS:
                if self._runner._scratch_exceeds():
                    return "output"
                checked = now
            ending = not all(pipe.open for pipe in self._pipes)
            seconds = min(deadline - now, END_POLL_SECONDS if ending else POLL_SECONDS)
            for number, _ in poll.poll(seconds * 1000):
                pipe = by_number[number]
                pipe.receive()
                if not pipe.open:
                    poll.unregister(number)
            if sum(len(pipe.content) for pipe in self._pipes) > self._most:
                return "output"

    def _close_inner(self) -> None:
        """Close the programs' ends of the pipes in this process."""
        for number in [*self._links, *(pipe.write for pipe in self._pipes if pipe.write >= 0)]:
            os.close(number)
        self._links = []
        for pipe in self._pipes:
            pipe.write = -1


def _move_to_memory(pipe: int, size: int) -> int:
    """Move bytes from a pipe to a file in memory without reading them; return its descriptor."""
    file = os.memfd_create("tests")
    while size:
        moved = os.splice(pipe, file, size)
        if not moved:
            raise EOFError("the trainer ended")
        size -= moved
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _reason(status: int, stderr: bytearray) -> tuple[str, str]:
    """Return why a program's process ended, "" for well, and a detail."""
    lines = stderr[-STDERR_BYTES:].decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:200] if lines else ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in {each.value for each in signal.Signals} else str(number)
        return ("timeout" if number == signal.SIGXCPU else "killed"), name
    code = os.WEXITSTATUS(status)
    if code == program_process.MEMORY_CODE or (code and last.startswith("MemoryError")):
        return "memory", last
    return ("error" if code else ""), last if code else ""


def _frames(content: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the messages of the tests' process, which may have been killed while it wrote one."""
    start = 0
    while start + HEADER <= len(content):
        size = int.from_bytes(content[start : start + HEADER], "big")
        body = content[start + HEADER : start + HEADER + size]
        if len(body) < size:
            return
        yield json.loads(body)
        start += HEADER + size
