"""The main function of a worker: a process that runs programs, each in a child of its own.

It is a new interpreter without site packages, environment and the trainer's descriptors. It forks: the child, in
namespaces where the host allows them, starts programs; the parent supervises it, and kills everything when the child
or the trainer ends. No program runs in either of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
from typing import Any, NoReturn

from hwgrpo.sandbox import landlock, namespaces
from hwgrpo.sandbox.confinement import Confinement
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.linux_calls import PR_SET_PDEATHSIG, prctl, protect_memory
from hwgrpo.sandbox.plain_values import receive, send
from hwgrpo.sandbox.program_run import END_SECONDS, Runner
from hwgrpo.support.child_processes import adopt_orphans, end_descendants

FIRST_PROGRAM_ID = 1_879_048_192
"""First user of programs where the trainer is root: above all that systemd or a distribution assigns."""
NOBODY = 65534
OPEN_FILES = 256
PRELOADED = (
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing"),
)
"""Modules that programs often import, imported once before all of them. Others would make every fork slower."""
ALSO_PRELOADED = (
    *("abc", "argparse", "array", "asyncio", "base64", "calendar", "cmath", "concurrent.futures", "csv", "ctypes"),
    *("datetime", "decimal", "fractions", "hashlib", "html", "inspect", "logging", "multiprocessing", "numbers"),
    *("pickle", "pprint", "queue", "resource", "secrets", "socket", "statistics", "struct", "tempfile"),
    *(
        "timeit",
        "traceback",
        "unicodedata",
        "unittest.async_case",
        "urllib.parse",
        "uuid",
        "xml.etree.ElementTree",
        "zlib",
    ),
)
"""Further ones, where the user of programs cannot read Python's folder."""
PROBE = "import os; os.getpid(); print(open('file', 'w').write('x'))"


def main(requests: int, replies: int, life: int) -> None:
    """Serve runs until the trainer closes a pipe.

    Args:
        requests: descriptor of a pipe from the trainer: the setup, then runs.
        replies: descriptor of a pipe to the trainer.
        life: descriptor of a pipe that ends when the trainer stops this process, or ends itself.
    """
    setup = receive(requests)
    limits = Limits(**setup["limits"])
    for name in PRELOADED:
        importlib.import_module(name)
    sys.path[:] = [*(each for each in sys.path if each != setup["root"]), *setup["packages"]]
    try:
        adopt_orphans()
        parts = list(setup["parts"])
        user = _program_user()
        inner = namespaces.enter_namespaces(user) if "namespaces" in parts else user
        protect_memory()
    except OSError as error:
        send(replies, {"refused": str(error)})
        return
    _fork_from_supervisor(requests, replies, life, "namespaces" in parts)
    try:
        runner = _open_runner(setup, parts, limits, inner)
    except OSError as error:
        send(replies, {"refused": str(error)})
        return
    gc.collect()
    gc.freeze()
    send(replies, {"ready": runner[1]})
    while _serve_in_child(runner[0], requests, replies):
        pass


def _serve_in_child(runner: Runner, requests: int, replies: int) -> bool:
    """Serve one request in a child; return whether there may be another.

    Programs are forks of that child. This process never has a program, its output or its tests in memory, so that none
    of them can be found there by a later program.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            adopt_orphans()
            request = receive(requests)
            send(replies, {"number": request["number"], "runs": _serve(runner, request, requests)})
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _program_user() -> int | None:
    """Return a user that only this worker's programs have, where this process may change to it."""
    if os.geteuid():
        return None
    for user in (FIRST_PROGRAM_ID + os.getpid(), NOBODY):
        if _succeeds_as(user, []):
            return user
    return None


def _succeeds_as(user: int, paths: list[str]) -> bool:
    """Return whether this process may become a user, which can reach these paths."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            for each in paths:
                os.stat(each)
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _fork_from_supervisor(requests: int, replies: int, life: int, isolated: bool) -> None:
    """Fork and return in the child; the parent supervises it and does not return."""
    alive, lives = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(life)
        os.close(alive)
        protect_memory()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        adopt_orphans()
        if not isolated and os.getppid() != supervisor:
            os._exit(1)
        return
    for each in (requests, replies, lives):
        os.close(each)
    _supervise(child, life, alive)


def _supervise(child: int, *ends: int) -> NoReturn:
    poll = select.poll()
    for each in ends:
        poll.register(each, select.POLLIN)
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    end_descendants(END_SECONDS)
    os._exit(0)


def _open_runner(
    setup: dict[str, Any], parts: list[str], limits: Limits, user: int | None
) -> tuple[Runner, dict[str, Any]]:
    """Confine this process as far as it can be, and run a first program; return what programs get.

    Raises:
        OSError: the host does not allow what the level needs.
    """
    readable = namespaces.readable_paths()
    os.chdir("/")
    missing = [f"{part} (hidden)" for part in setup["hidden"]]
    if "landlock" in parts:
        try:
            landlock.landlock_version()
        except OSError as error:
            parts.remove("landlock")
            missing.append(f"Landlock ({error.strerror})")
    if "namespaces" in parts:
        namespaces.mount_view(setup["folder"])
        readable = [namespaces.inside(path) for path in readable]
    reads_all = False
    if user is not None and "namespaces" not in parts:
        reads_all = not _succeeds_as(user, readable)
        if reads_all and "landlock" not in parts:
            reads_all = False
            missing.append("all but the usual modules: the user of programs cannot read Python's folder")
            for name in ALSO_PRELOADED:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    tasks = 0 if user is not None or "namespaces" in parts else _tasks_of(os.geteuid())
    while True:
        confinement = Confinement(limits, tuple(parts), user, readable, tasks, reads_all)
        confinement.prepare()
        runner = Runner(confinement, setup["folder"])
        result = runner.run_script(PROBE, "")
        if not result["reason"]:
            return runner, {"parts": parts, "missing": missing}
        if setup["level"] == "seccomp" or "seccomp" not in parts:
            raise OSError(f"a program that prints a number ended with {result['reason']}: {result['detail']}")
        parts.remove("seccomp")
        missing.append(f"seccomp ({result['detail']})")


def _tasks_of(user: int) -> int:
    """Return how many processes and threads a user has, and may start meanwhile."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return 2 * count + 64


def _serve(runner: Runner, request: dict[str, Any], requests: int) -> list[dict[str, Any]]:
    """Make the runs of a program, with each of its inputs until one is too slow, or with the tests in the pipe."""
    if "tests_bytes" in request:
        return [runner.run_functions(request["source"], requests, request["tests_bytes"])]
    runs = []
    for text in request["inputs"]:
        runs.append(runner.run_script(request["source"], text))
        if runs[-1]["reason"] in ("timeout", "output", "memory"):
            break
    return runs
