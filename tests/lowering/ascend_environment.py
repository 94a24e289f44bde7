"""The environment in which triton-ascend stands in for triton: made on first use, in a folder that git ignores.

It sees the torch and pytest of the environment the tests run in, after its own packages, so that only three small ones
are installed. triton-ascend lowers kernels without CANN and without an NPU.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PINS = REPO / "scripts" / "constraints" / "ascend-lowering.txt"
FOLDER = REPO / ".venv-ascend"
NEWEST = (3, 11)  # Python of the newest triton-ascend 3.2.0


def ascend_python() -> Path:
    """Return the environment's interpreter; fail the test, with the remedy, where it cannot be made."""
    if sys.version_info[:2] > NEWEST:
        pytest.fail(
            f"triton-ascend has no build for Python {sys.version.split()[0]}, which these tests share with it; "
            "HWGRPO_PYTHON=python3.11 bash scripts/setup.sh --fresh makes .venv with one that fits",
            pytrace=False,
        )
    python = FOLDER / "bin" / "python"
    made_from = hashlib.sha256(f"{PINS.read_text()}{sys.prefix}{sys.version}{FOLDER}".encode()).hexdigest()
    stamp = FOLDER / "made-from"
    with (REPO / ".venv-ascend.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == made_from:
            return python
        venv.create(FOLDER, clear=True, with_pip=False)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER)}))
        (own / "tests-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-r", str(PINS)]
        result = subprocess.run(install, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode:
            pytest.fail(
                f"cannot make {FOLDER.name} for the lowering tests; run this by hand and see: {' '.join(install)}\n"
                f"{result.stdout[-500:]}{result.stderr[-1500:]}",
                pytrace=False,
            )
        stamp.write_text(made_from)
    return python


def run_there(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python on the project's sources and wait for it.

    Args:
        words: arguments of python.
        cache: folder for what Triton keeps of a compilation.
    """
    paths = [str(REPO / folder) for folder in (".", "backends", "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [str(ascend_python()), *words], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
