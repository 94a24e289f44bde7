"""The package reasoning-gym for tests: the environment's, or fetched into a folder of its own."""

import importlib.util
from pathlib import Path

from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

PINS = ROOT / "scripts" / "constraints" / "reasoning.txt"


def folders() -> list[Path]:
    """Return the folders to put on the path; fetch them first.

    Raises:
        RuntimeError: pip cannot get them.
    """
    if importlib.util.find_spec("reasoning_gym") is not None:
        return []
    packages = [line.partition("==")[0] for line in PINS.read_text().splitlines() if "==" in line]
    return [fetched("reasoning", packages)]
