"""The package reasoning-gym for tests: the environment's, or fetched into a folder of its own."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.real.published import UnreachableError
from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

PINS = ROOT / "scripts" / "constraints" / "reasoning.txt"
NOWHERE = "(from versions: none)"
"""pip's message for a package of which it reaches no file."""


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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{pin} {NOWHERE}: let pip reach an index that has it (PIP_INDEX_URL)" if NOWHERE in done.stderr else None
