"""Which backends this project has been run on. Only its result files, which name the chip, are taken for evidence."""

from __future__ import annotations

import json
from pathlib import Path

from hwgrpo_backends import Backend

import hwgrpo

RESULTS = Path(hwgrpo.__file__).parents[1] / "benchmarks" / "results"
NEVER = "never run on hardware"


def proven_on(backend: Backend, folder: Path = RESULTS) -> str:
    """Return in words where this project was run on `backend`, or `NEVER`.

    Args:
        folder: of result files; an installed package brings none.
    """
    if backend.is_host:
        return "tested with every change"
    chips = {}
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # what cannot be read proves nothing
            continue
        machine = document.get("machine") if isinstance(document, dict) else None
        if isinstance(machine, dict) and machine.get("backend") == backend.name and machine.get("device"):
            chips.setdefault(str(machine["device"]), file.name)
    return "run on " + ", ".join(f"{chip} ({file})" for chip, file in chips.items()) if chips else NEVER
