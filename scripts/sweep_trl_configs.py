#!/usr/bin/env python3
"""Import every GRPO configuration of a folder and print what became of each, as a Markdown table.

    python scripts/sweep_trl_configs.py OPEN-R1/recipes num_processes=7

These are the YAML files with `num_generations` and `learning_rate`, which `trl grpo --config` and open-r1's scripts
read. Further arguments are settings that replace those of each file. Nothing is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hwgrpo.config import Config
from hwgrpo.config.keys import expand_names
from hwgrpo.config.typed import build
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.recipe_text import nested
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_reader import read_trl


def outcome(file: Path, settings: list[str]) -> tuple[str, str]:
    """Return what became of a file (imported, refused or stopped), and its refused settings or the message."""
    try:
        imported = import_trl(read_trl(str(file), settings, {})[0])
        build(Config, expand_names(nested(imported.settings)), "")
    except ConfigError as error:
        return "stopped", str(error)
    refused = ", ".join(f"`{each.key}`: {each.note}" for each in imported.refused())
    return "refused" if refused else "imported", refused


def main(arguments: list[str]) -> int:
    """Print the table of a folder."""
    if not arguments or not Path(arguments[0]).is_dir():
        print("usage: python scripts/sweep_trl_configs.py FOLDER [KEY=VALUE ...]", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    print("| file | result | settings without a counterpart, or the message |\n|---|---|---|")
    for file in sorted(folder.rglob("*.y*ml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "num_generations:" in text and "learning_rate:" in text:
            result, detail = outcome(file, arguments[1:])
            print(f"| {file.relative_to(folder)} | {result} | {' '.join(detail.replace('|', '/').split())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
