"""Tier 2: self-tests of every device of the selected backend, each device in its own child process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hwgrpo_backends import Backend

from hwgrpo.doctor import child_environment

SCRIPT = Path(__file__).with_name("device_check_child.py")
LIMIT = 300.0
"""Timeout in seconds per device; kernels are compiled when they first run."""
RANKS = 2


@dataclass(frozen=True)
class SelfTest:
    """Result of one self-test on one device."""

    device: str
    name: str
    state: Literal["PASS", "FAIL", "SKIP"]
    detail: str

    def to_json(self) -> dict[str, str]:
        """Return the entry of `hwgrpo doctor --json`."""
        return {"device": self.device, "what": self.name, "state": self.state, "told": self.detail}


def run_self_tests(
    backend: Backend, devices: int, limit: float = LIMIT, environ: Mapping[str, str] = os.environ
) -> list[SelfTest]:
    """Test every device of `backend`, one after the other, then two ranks together.

    Args:
        backend: the selected backend.
        devices: number of its devices that this process can use.
        limit: timeout in seconds of one device, or of the ranks together.
        environ: environment of the children.
    """
    tests = []
    for index in range(1 if backend.is_host else devices):
        tests += _test_device(backend, index, limit, environ)
    return tests + _test_ranks(backend, devices, limit, environ)


def _test_device(backend: Backend, index: int, limit: float, environ: Mapping[str, str]) -> list[SelfTest]:
    request = {"backend": backend.name, "index": index, "what": "device"}
    (output,) = child_environment.run_children(SCRIPT, [request], limit, environ)
    return _parse(output, backend.name if backend.is_host else f"{backend.name}:{index}", "start")


def _test_ranks(backend: Backend, devices: int, limit: float, environ: Mapping[str, str]) -> list[SelfTest]:
    name = f"{backend.name} x {RANKS}"
    if not backend.is_host and devices < RANKS:
        return [SelfTest(name, "collectives", "SKIP", f"needs {RANKS} devices, this process sees {devices}")]
    with tempfile.TemporaryDirectory() as folder:
        common = {"backend": backend.name, "what": "ranks", "world": RANKS, "store": f"{folder}/store"}
        requests = [{**common, "index": rank, "rank": rank} for rank in range(RANKS)]
        outputs = child_environment.run_children(SCRIPT, requests, limit, environ)
    tests = [test for output in outputs for test in _parse(output, name, "collectives")]
    return [next((test for test in tests if test.state == "FAIL"), tests[0])]


def _parse(output: child_environment.ChildOutput, device: str, first: str) -> list[SelfTest]:
    """Return the self-tests of one child; the one that was running when the child ended early has failed."""
    tests = [SelfTest(device, line["test"], line["state"], line["detail"]) for line in output.lines if "test" in line]
    started = [line["started"] for line in output.lines if "started" in line]
    if output.failure or not tests:
        unfinished = started[-1] if len(started) > len(tests) else first if not started else "end"
        tests.append(SelfTest(device, unfinished, "FAIL", output.failure or "no output"))
    return tests
