"""The package reasoning-gym for tests: the environment's, or fetched into a folder of its own."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.published import UnreachableError, is_unreachable
from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

PINS = ROOT / "scripts" / "constraints" / "reasoning.txt"
SECONDS = 120
"""Most seconds for one file."""


def folder() -> Path:
    """Return the folder to put on the path, after fetching what is missing.

    Raises:
        UnreachableError: pip reaches no index that has the package.
        RuntimeError: pip fails otherwise.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parents[1]
    pins = [line for line in PINS.read_text().splitlines() if "==" in line]
    try:
        return fetched("reasoning", [pin.partition("==")[0] for pin in pins])
    except RuntimeError as error:
        if reason := why_unreachable(pins[0]):
            raise UnreachableError(reason) from error
        raise


def why_unreachable(pin: str) -> str | None:
    """Return why pip gets no file of a package, or None where it gets one."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, pin]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip gets no {pin} within {SECONDS:g} s: let it reach an index that has it (PIP_INDEX_URL)"
    if not done.returncode or not is_unreachable(done.stderr):
        return None
    return f"pip reaches no index with {pin}: let it reach one that has it (PIP_INDEX_URL)"
