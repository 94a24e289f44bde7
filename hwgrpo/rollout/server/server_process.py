"""A rollout server process that the run starts and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.server.http_client import Client, RefusedByServer, ServerProblem
from hwgrpo.support.text import hide_secrets
from hwgrpo.support.waits import Wait

STOP_TIMEOUT = 20.0
"""Seconds for a server to exit after SIGTERM, before SIGKILL."""
LOG_LINES = 15
"""Lines of the log that are shown when a server does not start."""
PAUSE = 0.5
REFUSAL_TIMEOUT = 30.0
"""Seconds for which a starting server may reject the token or its own paths."""


class ServerProcess:
    """One server process, which can be restarted.

    Args:
        command: program and arguments.
        environment: its environment variables.
        log: file to which its output is appended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._environment = environment
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart the process.

        Raises:
            ConfigError: the program cannot be run.
        """
        self.stop()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=dict(self._environment),
                    stdin=subprocess.PIPE,  # closed when this process dies, however it dies: the server then ends
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"rollout.server.python={self._command[0]!r} cannot be run: {error.strerror}; name the Python of "
                    "an environment that has the server"
                ) from error

    @property
    def program(self) -> str:
        """The program that runs."""
        return self._command[0]

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        process = self._process  # which another thread may be ending
        return process is not None and process.poll() is None

    def wait_until_healthy(self, client: Client, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the server responds, or `cancelled` returns True.

        Raises:
            ConfigError: it exited, or did not respond in time.
        """
        wait = Wait(f"the rollout server to start (its log is {self.log})", seconds)
        problem, refused_since = "", 0.0
        while not wait.over:
            ended = not self.alive
            if cancelled():  # checked last: the caller cancels first, then stops the process
                return
            if ended:
                raise ConfigError(
                    f"the rollout server ended while it started; its log {self.log} says:\n{self._tail()}"
                )
            try:
                client.request("GET", "/health", timeout=min(10.0, max(wait.left, PAUSE)))
            except ServerProblem as error:
                problem = f" ({error})"
                refused_since = (refused_since or time.monotonic()) if isinstance(error, RefusedByServer) else 0.0
                if refused_since and time.monotonic() - refused_since > REFUSAL_TIMEOUT:
                    raise ConfigError(
                        f"the rollout server rejects this run's requests{problem}; its log {self.log} says:\n"
                        f"{self._tail()}"
                    ) from error
                wait.pause(PAUSE)
            else:
                return
        raise ConfigError(
            f"the rollout server did not start within rollout.server.start_timeout={seconds:g} s{problem}; its log "
            f"{self.log} says:\n{self._tail()}"
        )

    def stop(self) -> None:
        """Stop it and all its child processes."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
        _signal(process.pid, signal.SIGKILL)  # children that outlived it, too
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a system call that does not end
            process.wait(STOP_TIMEOUT)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return hide_secrets("\n".join(lines[-LOG_LINES:]))


def free_ports(host: str, count: int) -> list[int]:
    """Return free ports of `host`, all different: each is bound until the last is known."""
    with contextlib.ExitStack() as bound:
        ports = []
        for _ in range(count):
            probe = bound.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
