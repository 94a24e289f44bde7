"""A rollout server that the run starts, watches and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.server.http_client import Client, Refused, ServerProblem
from hwgrpo.text import hide_secrets
from hwgrpo.waits import Wait

PATIENCE = 20.0
"""Seconds that a server has to end by itself."""
LOG_LINES = 15
"""Lines of its log that are shown when a server does not start."""
PAUSE = 0.5
REFUSAL_TIMEOUT = 30.0
"""Seconds that a server which starts may refuse the token, or not know its own paths."""


class ServerProcess:
    """One server, which can be started again.

    Args:
        command: what is run.
        environment: its variables.
        log: file that its output goes to, appended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._environment = environment
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or end it and start it again.

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
    def alive(self) -> bool:
        """Whether it runs."""
        process = self._process  # which another thread may be ending
        return process is not None and process.poll() is None

    def wait_until_healthy(self, client: Client, seconds: float, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Wait for it to answer, or until it is unwanted.

        Raises:
            ConfigError: it ended, or did not answer in time.
        """
        wait = Wait(f"the rollout server to start (its log is {self.log})", seconds)
        problem, refused_since = "", 0.0
        while not wait.over:
            ended = not self.alive
            if unwanted():  # looked at last: who wants it no more says so first, and then ends it
                return
            if ended:
                raise ConfigError(
                    f"the rollout server ended while it started; its log {self.log} says:\n{self._tail()}"
                )
            try:
                client.ask("GET", "/health", timeout=min(10.0, max(wait.left, PAUSE)))
            except ServerProblem as error:
                problem = f" ({error})"
                refused_since = (refused_since or time.monotonic()) if isinstance(error, Refused) else 0.0
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
        """End it and all its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        _signal(process.pid, signal.SIGKILL)  # children that outlived it, too
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a system call that does not end
            process.wait(PATIENCE)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return hide_secrets("\n".join(lines[-LOG_LINES:]))


def free_port(host: str) -> int:
    """Return a port of `host` that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def interpreter(named: str | None) -> str:
    """Return the Python that runs the server."""
    return str(Path(named).expanduser()) if named else sys.executable


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
