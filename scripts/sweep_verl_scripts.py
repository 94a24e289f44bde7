#!/usr/bin/env python3
"""Import every run script of a copy of verl and print what became of each, as a Markdown table.

    python scripts/sweep_verl_scripts.py VERL/examples/grpo_trainer > benchmarks/results/verl_scripts.md

Nothing of a script is run. A script is imported, refused for settings without a counterpart here, which are named, or
stopped by an error before that.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hwgrpo.config import Config
from hwgrpo.config.keys import expand_names
from hwgrpo.config.typed import build
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.recipe_text import nested
from hwgrpo.migrate.imports.verl_import import import_verl
from hwgrpo.migrate.imports.verl_reader import read_verl

_TRAINS = re.compile(r"^[^#\n]*\b(?:verl|recipe)[./][\w./]*main_(?!eval|generation)\w+", re.MULTILINE)
_ENVIRONMENT = {"HOME": "/root", "PWD": "/root"}


@dataclass(frozen=True)
class Outcome:
    """What became of a script."""

    script: str
    result: str
    """imported, refused or stopped."""
    detail: str
    """The settings without a counterpart, or the message."""


def starts_trainer(text: str) -> bool:
    """Return whether a script starts one of verl's trainers."""
    return bool(_TRAINS.search(text))


def outcome(file: Path, name: str) -> Outcome:
    """Return what becomes of a script, with no variables of the environment but HOME and PWD."""
    try:
        settings, _ = read_verl(str(file), [], _ENVIRONMENT)
        imported = import_verl(settings)
        build(Config, expand_names(nested(imported.settings)), "")
    except ConfigError as error:
        return Outcome(name, "stopped", str(error))
    refused = [f"`{each.key}={each.value}`" for each in imported.refused()]
    return Outcome(name, "refused" if refused else "imported", ", ".join(refused))


def table(outcomes: list[Outcome], source: str) -> str:
    """Return a page with the counts and a line per script."""
    counts = Counter(each.result for each in outcomes)
    total = ", ".join(f"{counts[each]} {each}" for each in ("imported", "refused", "stopped"))
    lines = [
        "# verl's run scripts, imported",
        "",
        f"{source}: {len(outcomes)} scripts that start a trainer: {total}.",
        "Refused are settings that have no counterpart here; `--drop-refused` leaves them out. Written by",
        "`python scripts/sweep_verl_scripts.py`, with no variables of the environment but HOME and PWD;",
        f"hwgrpo of commit {head_of(Path(__file__).parent, '%h')}.",
        "",
        "| script | result | settings without a counterpart, or the message |",
        "|---|---|---|",
    ]
    for each in outcomes:
        detail = each.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {each.script} | {each.result} | {detail} |")
    return "\n".join(lines) + "\n"


def source_of(folder: Path) -> str:
    """Return the folder's name with its commit, where it is a checkout."""
    commit = head_of(folder, "%h, %cs")
    return f"`{folder.name}`" + (f" ({commit})" if commit else "")


def head_of(folder: Path, form: str) -> str:
    """Return the newest commit of a checkout in a form of git; "" where it is none."""
    asked = ["git", "-C", str(folder), "log", "-1", f"--format={form}"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: list[str]) -> int:
    """Print the table of a folder."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python scripts/sweep_verl_scripts.py FOLDER-WITH-RUN-SCRIPTS", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    files = [each for each in sorted(folder.rglob("*.sh")) if starts_trainer(each.read_text(errors="replace"))]
    print(table([outcome(each, str(each.relative_to(folder))) for each in files], source_of(folder)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
