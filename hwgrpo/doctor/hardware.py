"""Which backends this project has been run on, and how that went: by records that name chip, driver, command, commit.

`scripts/record_hardware.py` writes one on a machine with the device. The README's table and `hwgrpo doctor` say what
`proven_on` says, and no more.
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
"""Field of a record -> its type; texts may not be empty."""
RUN_FIELDS = {"name": str, "command": str, "outcome": str, "seconds": (int, float), "figures": dict}
"""The same of each thing that was run, the entries of `what`."""
OUTCOMES = ("passed", "failed")

_PACKAGE = Path(hwgrpo.__file__).parent
FOLDERS = (_PACKAGE / "hardware", _PACKAGE.parent / "benchmarks" / "results" / "hardware")
"""Where records are: in a wheel, in the repository."""


def records(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return every valid record by its file's name; what is none proves nothing.

    Args:
        folder: where to look; the one of this installation when left out.
    """
    folder = next((each for each in FOLDERS if each.is_dir()), FOLDERS[0]) if folder is None else folder
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not problems(document):
            found[file.name] = document
    return found


def problems(document: Any) -> list[str]:
    """Return what keeps a document from being a record, one line each."""
    if not isinstance(document, dict):
        return [f"it is a {type(document).__name__}, not an object"]
    wrong = _wrong_fields(document, FIELDS, "")
    if wrong:
        return wrong
    if document["schema"] != SCHEMA:
        wrong.append(f"schema is {document['schema']!r}, not {SCHEMA!r}")
    if not re.fullmatch(r"[0-9a-f]{40}", document["commit"]):
        wrong.append(f"commit {document['commit']!r} is not the 40 digits of one")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", document["date"]):
        wrong.append(f"date {document['date']!r} is not of the form 2026-01-31")
    if not document["what"]:
        wrong.append("what is empty: nothing was run")
    for number, each in enumerate(document["what"]):
        place = f"what[{number}]."
        if not isinstance(each, dict):
            wrong.append(f"{place} is no object")
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
    """Return in words where this project was run on `backend`, or `NEVER`.

    Args:
        folder: of the records; the one of this installation when left out.
    """
    mine = [record for record in records(folder).values() if record["backend"] == backend.name]
    said = ["tested with every change"] if backend.is_host else []
    said += [_words(record) for record in sorted(mine, key=lambda record: record["date"], reverse=True)]
    return "; ".join(said) or NEVER


def _words(record: dict[str, Any]) -> str:
    by_outcome = {
        outcome: ", ".join(each["name"] for each in record["what"] if each["outcome"] == outcome)
        for outcome in OUTCOMES
    }
    ran = [f"{by_outcome['passed']} passed"] if by_outcome["passed"] else []
    ran += [f"{by_outcome['failed']} FAILED"] if by_outcome["failed"] else []
    chips = record["chip"] if record["devices"] == 1 else f"{record['devices']} x {record['chip']}"
    return f"{chips}: {', '.join(ran)} (commit {record['commit'][:7]}, {record['date']})"
