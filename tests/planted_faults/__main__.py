"""Plant faults into the sources, one at a time, and run the tests that must fail then.

`python -m tests.planted_faults` plants all of them into a copy of the sources, `... ppo top_p` those whose names
contain one of the words. It exits with 1 if tests still pass, or fail without the fault. That takes minutes, so the
tests only check that every fault can be planted. Faults of kernels and of plug-in backends are planted by tests of
theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "hwgrpo",
    "backends",
    "kernels",
    "configs",
    "scripts",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
)
FAILED = (1, 2)
"""Exit codes of pytest where tests failed, or could not be collected."""


def fails(tests: str, fault: Fault | None = None) -> bool:
    """Return whether tests fail in a copy of the sources, with a fault or without."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            subprocess.run(["cp", "-r", str(ROOT / name), folder], check=True)
        (ROOT / "build").mkdir(exist_ok=True)
        (copy / "build").symlink_to(ROOT / "build")  # packages that slow tests have fetched
        if fault is not None:
            path = copy / "hwgrpo" / fault.file
            path.write_text(path.read_text().replace(fault.text, fault.planted))
        paths = os.pathsep.join(str(copy / each) for each in (".", "backends", "kernels"))
        first, *more = tests.split()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", f"tests/{first}", *more]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode in FAILED


def main(words: list[str]) -> int:
    """Plant the faults whose names contain one of the words, all if there are none; return the exit code."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    broken = {tests for tests in dict.fromkeys(fault.tests for fault in chosen) if fails(tests)}
    red = 0
    for fault in chosen:
        outcome = "fails without" if fault.tests in broken else "red" if fails(fault.tests, fault) else "SURVIVED"
        red += outcome == "red"
        print(f"{outcome:<13} {fault.name} ({fault.file}; tests/{fault.tests})", flush=True)
    print(f"{red} of {len(chosen)} red")
    return int(red < len(chosen) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
