"""The resumes of a run as rows of a table: from which machine to which, and what differed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "not recorded"
NOT_COMPARED = "not compared"


def resume_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `{step, from, to, difference, mood}` of each resume, oldest first.

    Args:
        records: `resumes` of environment.json.
    """
    moods: dict[Any, str] = {True: "good", False: "bad"}
    return [
        {
            "step": int(record["step"]),
            "from": _machine(record.get("from")),
            "to": _machine(record.get("to")),
            "difference": "; ".join(map(_difference, record.get("stages", ()))) or NOT_COMPARED,
            "mood": moods.get(record.get("passed"), "muted"),
        }
        for record in records
    ]


def _machine(machine: Mapping[str, Any] | None) -> str:
    if machine is None:
        return MISSING
    names = ("device", "dtype", "torch", "layout", "attention", "strategy", "ranks")
    facts = {"torch": "torch {}", "ranks": "ranks: {}"}
    shown = [facts.get(name, "{}").format(machine[name]) for name in names if name in machine]
    return f"{machine.get('backend')} ({', '.join(shown)})"


def _difference(stage: Mapping[str, Any]) -> str:
    """Return a stage's error, and its share of the tolerance; numbers that are not finite are strings."""
    error, tolerance = float(stage["error"]), float(stage["tolerance"])
    if not math.isfinite(error):
        return f"{stage['name']}: not finite"
    if not error:
        return f"{stage['name']}: none"
    share = f"{error / tolerance:.2g}" if tolerance else "inf"
    return f"{stage['name']}: {error:.2g}, {share} of what rounding explains"
