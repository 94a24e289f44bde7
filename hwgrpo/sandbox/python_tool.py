"""The tool `python`: runs a program that the model wrote, in a sandbox."""

from __future__ import annotations

import queue
import threading
from typing import Any

from hwgrpo.errors import ConfigError, quoted
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.sandbox_pool import SandboxPool

REASONS = {
    "timeout": "the program took longer than {seconds:g} s and was stopped",
    "memory": "the program used more than {memory_mib} MiB of memory",
    "output": "the program wrote more than {output_kib} KiB, or too many files",
    "killed": "the program was killed",
}
FAILURES = {"timeout": "timeout", "memory": "died", "output": "died", "killed": "died"}
"""Reason of a run's end -> kind of the failure of the call; others are errors."""


class Python:
    """Programs in a sandbox; nothing is kept between calls.

    Args:
        sandbox_level: protection level, as of `reward.sandbox.level`.
        memory_mib: limit on the memory of a program, in MiB.
        site_packages: programs may import the packages of this Python, e.g. numpy, and read their files.
        timeout: limit on the time of a program, in seconds.
        workers: programs that run at once.
        key: the tool's setting, for messages.

    Raises:
        ConfigError: an argument is out of range, or this host does not allow the level.
    """

    def __init__(
        self,
        sandbox_level: str = "auto",
        memory_mib: int = 1024,
        site_packages: bool = False,
        *,
        timeout: float = 30.0,
        workers: int = 4,
        key: str = "tool python",
    ) -> None:
        if not isinstance(site_packages, bool):
            raise ConfigError(f"{key}.kwargs.site_packages={quoted(site_packages)} must be true or false")
        self._limits = Limits(seconds=timeout, memory_mib=memory_mib)
        self._site_packages = site_packages
        first = SandboxPool(sandbox_level, self._limits, 1, site_packages=site_packages)
        print(first.description, flush=True)
        self._level = first.level
        self._pools = [first]
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[SandboxPool] = queue.LifoQueue()
        self._idle.put(first)
        self._left = workers - 1

    def run(self, code: str) -> tuple[str, str]:
        """Run a Python program and return what it prints; nothing is kept between runs, so print what you need.

        Args:
            code: The program.
        """
        pool = self._take()
        try:
            (result,) = pool.run([{"source": code, "inputs": [""]}])[0]
        finally:
            self._idle.put(pool)
        reason = str(result["reason"])
        return self._text(result), FAILURES.get(reason, reason)

    def close(self) -> None:
        """End the processes of the sandbox."""
        for pool in self._pools:
            pool.close()
        self._pools = []

    def _take(self) -> SandboxPool:
        """Return a pool that no other thread uses: a pool of one process is cheap, and is not shared by threads."""
        with self._lock:
            starts = self._left > 0 and self._idle.empty()
            self._left -= starts
        if not starts:
            return self._idle.get()
        try:
            pool = SandboxPool(self._level, self._limits, 1, site_packages=self._site_packages)
        except BaseException:
            with self._lock:
                self._left += 1
            raise
        with self._lock:
            self._pools.append(pool)
        return pool

    def _text(self, result: dict[str, Any]) -> str:
        """Return what the model reads of a run: stdout, then stderr or the reason of the end."""
        limits, stderr = self._limits, result.get("stderr", "").rstrip("\n")
        reason = REASONS.get(result["reason"], "").format(
            seconds=limits.seconds, memory_mib=limits.memory_mib, output_kib=limits.output_kib
        )
        if result["reason"] == "error" and not stderr:
            reason = "the program ended with an exit code that is not 0"
        parts = [result["stdout"].rstrip("\n"), stderr, reason and f"Error: {reason}"]
        return "\n".join(filter(None, parts)) or "(the program printed nothing)"
