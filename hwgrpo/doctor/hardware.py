"""Backends that this project has been run on, from records that name chip, driver, command, outcome and commit.

`scripts/record_hardware.py` writes one on a machine with the device. The README's table and `hwgrpo doctor` show the
text of `proven_on`, and no more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend

import hwgrpo

SCHEMA = "hwgrpo.hardware/1"
NEVER = "never run on hardware"
FIELDS = {
    "schema": str, "backend": str, "chip": str, "arch": str, "devices": int, "driver": str, "system": str,
    "versions": dict, "commit": str, "date": str, "what": list,
}  # fmt: skip
"""Field of a record -> its type; strings may not be empty."""
RUN_FIELDS = {"name": str, "command": str, "outcome": str, "seconds": (int, float), "figures": dict}
"""The same for the entries of `what`: one per command that was run."""
OUTCOMES = ("passed", "failed")

_PACKAGE = Path(hwgrpo.__file__).parent
FOLDERS = (_PACKAGE / "hardware", _PACKAGE.parent / "benchmarks" / "results" / "hardware")
"""Folders of records: in a wheel, in the repository."""


def records(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return file name -> record; invalid records are ignored.

    Args:
        folder: folder of records; None: this installation's.
    """
    folder = next((each for each in FOLDERS if each.is_dir()), FOLDERS[0]) if folder is None else folder
    valid = {}
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not problems(document):
            valid[file.name] = document
    return valid


def problems(document: Any) -> list[str]:
    """Return the reasons why a document is not a record, one line each."""
    if not isinstance(document, dict):
        return [f"it is a {type(document).__name__}, not an object"]
    wrong = _wrong_fields(document, FIELDS, "")
    if wrong:
        return wrong
    if document["schema"] != SCHEMA:
        wrong.append(f"schema is {document['schema']!r}, not {SCHEMA!r}")
    if not re.fullmatch(r"[0-9a-f]{40}", document["commit"]):
        wrong.append(f"commit {document['commit']!r} is not 40 hexadecimal digits")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", document["date"]):
        wrong.append(f"date {document['date']!r} is not of the form 2026-01-31")
    if not document["what"]:
        wrong.append("what is empty: nothing was run")
    for number, each in enumerate(document["what"]):
        place = f"what[{number}]."
        if not isinstance(each, dict):
            wrong.append(f"{place} is not an object")
            continue
        wrong += _wrong_fields(each, RUN_FIELDS, place)
        if each.get("outcome") not in OUTCOMES:
            wrong.append(f"{place}outcome is {each.get('outcome')!r}, not one of {', '.join(OUTCOMES)}")
    return wrong


def _wrong_fields(document: dict[str, Any], fields: dict[str, Any], place: str) -> list[str]:
    wrong = []
    for name, kind in fields.items():
        value = document.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            wrong.append(f"{place}{name} is {value!r}")
        elif value == "":
            wrong.append(f"{place}{name} is empty")
    return wrong + [f"{place}{name} is not a field" for name in document.keys() - fields.keys()]


def proven_on(backend: Backend, folder: Path | None = None) -> str:
    """Return a line about the hardware on which this project was run on `backend`, or `NEVER`.

    Args:
        backend: the backend.
        folder: folder of records; None: this installation's.
    """
    mine = [record for record in records(folder).values() if record["backend"] == backend.name]
    lines = ["tested with every change"] if backend.is_host else []
    lines += [_summary(record) for record in sorted(mine, key=lambda record: record["date"], reverse=True)]
    return "; ".join(lines) or NEVER


def _summary(record: dict[str, Any]) -> str:
    by_outcome = {
        outcome: ", ".join(each["name"] for each in record["what"] if each["outcome"] == outcome)
        for outcome in OUTCOMES
    }
    ran = [f"{by_outcome['passed']} passed"] if by_outcome["passed"] else []
    ran += [f"{by_outcome['failed']} FAILED"] if by_outcome["failed"] else []
    chips = record["chip"] if record["devices"] == 1 else f"{record['devices']} x {record['chip']}"
    return f"{chips}: {', '.join(ran)} (commit {record['commit'][:7]}, {record['date']})"
