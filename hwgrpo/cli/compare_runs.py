"""`hwgrpo compare-runs`: where the curves of runs part, and what explains it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo.report.loaded_run import LoadedRun
    from hwgrpo.report.run_comparison import RunComparison

HELP = "show where the curves of runs part, and what explains it"
EXIT_CODES = (
    "exit codes: 0 identical to the bit, or the same within noise; 1 they part; 2 a folder is no run, or is damaged"
)
SCHEMA = "hwgrpo.compare_runs/1"
SAME, PARTS = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = EXIT_CODES
    parser.add_argument("first", metavar="A", help="folder of a run, finished or not")
    parser.add_argument("others", nargs="+", metavar="B", help="folders of runs, each compared with A")
    parser.add_argument("--all", action="store_true", help="show every metric that differs, not only the main ones")
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA}), with every metric")


def run(args: argparse.Namespace) -> int:
    """Print the comparison of A with each other run. Returns 0 where all are the same within noise, else 1."""
    from hwgrpo.cli.run_comparison_text import comparison_text
    from hwgrpo.report.loaded_run import load_run, name_damage
    from hwgrpo.report.run_comparison import compare
    from hwgrpo.support.terminal_width import terminal_columns

    folders = [Path(each) for each in (args.first, *args.others)]
    _check_different(folders)
    first = load_run(folders[0])
    results = []
    for i, folder in enumerate(folders[1:]):
        other = load_run(folder)
        with name_damage(folders[0], folder):
            results.append((other, compare(first, other)))
        if not args.json:
            print("\n" * bool(i) + comparison_text(first, *results[-1], every=args.all, columns=terminal_columns()))
    if args.json:
        from hwgrpo.support.jsonlines import jsonable

        document = {
            "schema": SCHEMA,
            "a": str(first.record.folder),
            "comparisons": [report(other, result) for other, result in results],
        }
        print(json.dumps(jsonable(document), indent=1, allow_nan=False))
    return PARTS if any(result.verdict == "parts" for _, result in results) else SAME


def report(other: LoadedRun, result: RunComparison) -> dict[str, object]:
    """Return a comparison as values of the JSON document of `SCHEMA`."""
    gap = [{"metric": metric, "a": a, "b": b} for metric, a, b in result.gap]
    return {"b": str(other.record.folder), **asdict(result), "gap": gap}


def _check_different(folders: list[Path]) -> None:
    seen: dict[Path, Path] = {}
    for folder in folders:
        same = seen.setdefault(folder.resolve(), folder)
        if same is not folder:
            raise ConfigError(f"{folder} is the same folder as {same}; name the folders of different runs")
