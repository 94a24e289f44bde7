"""What a child gives up before it runs a program: descriptors, user, capabilities, resources, files, system calls."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import platform
import resource
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hwgrpo.sandbox import linux_calls as linux
from hwgrpo.sandbox.landlock import restrict_files
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.namespaces import DEVICES
from hwgrpo.sandbox.seccomp_filter import install_seccomp_filter, seccomp_program
from hwgrpo.support.child_processes import FIXED_HASHES

LAST_CAPABILITY = 63
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of programs: NumPy's libraries otherwise start a thread per core, more than the limits allow."""
FIRST_FREE = 64
"""Descriptors of a child are duplicated to numbers from here on before they get their own."""


@dataclass(frozen=True)
class Confinement:
    """How the children of a worker are confined."""

    limits: Limits
    parts: Collection[str]
    """Of "namespaces", "seccomp", "landlock": those that this host has and the level uses."""
    user: int | None
    """User and group of programs; None: the worker's own."""
    readable: Sequence[str]
    """Files and folders that a program may read."""
    other_tasks: int = 0
    """Processes and threads that this user has beside the program, which the kernel's limit counts with it."""
    reads_all: bool = False
    """Whether programs keep the capability to read folders that their user cannot, within Landlock's."""

    def prepare(self) -> None:
        """Give up in the worker itself what none of its children needs: signal handlers, further capabilities."""
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError in the program
        with contextlib.suppress(OSError):  # beyond the kernel's last one, or not privileged: there is none
            for number in range(LAST_CAPABILITY + 1):
                linux.prctl(linux.PR_CAPBSET_DROP, number)
        with contextlib.suppress(OSError):
            seccomp_program(platform.machine())

    def apply(self, descriptors: Sequence[int], scratch: str) -> None:
        """Confine this process, which runs a program next.

        Args:
            descriptors: those that it keeps, which become 0, 1, 2, ...; all others are closed.
            scratch: its working directory, the one place where it may write.

        Raises:
            OSError: the host does not allow it; the program must not run.
        """
        parent = os.getppid()
        self._keep(descriptors)
        os.setsid()
        os.umask(0o077)
        os.chdir(scratch)
        os.environ.clear()
        os.environ |= {"HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8", "PATH": "/nowhere"}
        os.environ |= ONE_THREAD
        os.environ |= FIXED_HASHES
        self._limit_resources()
        if "seccomp" not in self.parts:
            # System V memory, semaphores and queues end with the program; a trainer without the privilege shares them
            with contextlib.suppress(OSError):
                linux.unshare(linux.CLONE_NEWIPC)
        self._change_user()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.protect_memory()
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the worker ended before it could be noticed
        if "landlock" in self.parts:
            restrict_files((*self.readable, *DEVICES), (scratch, "/dev/null"))
        if "seccomp" in self.parts:
            install_seccomp_filter()

    def _keep(self, descriptors: Sequence[int]) -> None:
        copies = [fcntl.fcntl(each, fcntl.F_DUPFD, FIRST_FREE) for each in descriptors]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        os.closerange(len(copies), 1 << 16)

    def _limit_resources(self) -> None:
        limits = self.limits
        seconds = math.ceil(limits.seconds)
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, seconds, seconds + 1),
            (resource.RLIMIT_AS, limits.memory_mib << 20, limits.memory_mib << 20),
            (resource.RLIMIT_NPROC, limits.processes + self.other_tasks, limits.processes + self.other_tasks),
            (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
            (resource.RLIMIT_FSIZE, limits.file_mib << 20, limits.file_mib << 20),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_MSGQUEUE, 0, 0),
            (resource.RLIMIT_SIGPENDING, 64 + self.other_tasks, 64 + self.other_tasks),
        ):
            most = resource.getrlimit(kind)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(kind, (soft, hard))

    def _change_user(self) -> None:
        """Change to the user of programs, and drop all capabilities."""
        kept = 1 << linux.CAP_DAC_READ_SEARCH if self.reads_all else 0
        if self.user is not None and self.user != os.geteuid():
            if kept:
                linux.prctl(linux.PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        with contextlib.suppress(OSError):
            linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
        linux.set_capabilities(kept)
