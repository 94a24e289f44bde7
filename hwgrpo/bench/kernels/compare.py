"""Two documents of `hwgrpo bench kernels` side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from hwgrpo.bench.kernels.result import SCHEMA
from hwgrpo.bench.kernels.show import MISSING, milliseconds, rate
from hwgrpo.bench.terminal import make_console, number_table, print_part
from hwgrpo.errors import ConfigError

LETTERS = "AB"
BAR = 10
"""Characters of the longest bar."""


@dataclass(frozen=True)
class Row:
    """One way to compute a case at one shape, in both documents."""

    shape: str
    case: str
    side: str
    first: Mapping[str, Any] | None
    """As `side` of the document; None where it has no such row, or did not time it."""
    second: Mapping[str, Any] | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast the second is as the first."""
        if self.first is None or self.second is None:
            return None
        return self.first["median_s"] / self.second["median_s"]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        a, b = (each and {key: each[key] for key in ("median_s", "share_of_ceiling")} for each in _both(self))
        return {"shape": self.shape, "case": self.case, "side": self.side, "a": a, "b": b, "ratio": self.ratio}


def read_document(file: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ConfigError: the file is missing, is not JSON, or has another schema.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file; `hwgrpo bench kernels --json {file}` writes one")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ConfigError(
            f"{file} has the schema {schema!r}, and this version compares {SCHEMA!r}: "
            "measure again with `hwgrpo bench kernels --json`"
        )
    return document


def compare_documents(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """Return a row for everything that either document timed, in the order of the first, then of the second.

    Shapes are the same when their sizes are, whatever they are called.
    """
    a, b = _timed(first), _timed(second)
    return [Row(*key, a.get(key), b.get(key)) for key in dict.fromkeys((*a, *b))]


def show_comparison(
    names: tuple[str, str], first: Mapping[str, Any], second: Mapping[str, Any], rows: list[Row]
) -> None:
    """Print two documents side by side.

    Args:
        names: what the documents are called.
        first, second: the documents.
        rows: from `compare_documents`.
    """
    console = make_console()
    for letter, name, document in zip(LETTERS, names, (first, second), strict=True):
        console.print(Text(f"{letter}  {name}: {_described(document)}"), soft_wrap=not console.is_terminal)
    if first["dtype"] != second["dtype"] or first["clock"] != second["clock"]:
        console.print(Text("note: dtypes or clocks differ, so the ratios compare unlike things", style="yellow"))
    longest = max((row.ratio or 0 for row in rows), default=0)
    shapes = dict.fromkeys(row.shape for row in rows)
    shared = [shape for shape in shapes if not any(_lacks(rows, shape, letter) for letter in LETTERS)]
    if not shared:
        console.print()
        console.print(Text("the two have no shape in common", style="yellow"))
    for shape in shared:
        console.print()
        console.print(Text(shape, style="bold"))
        table = number_table("", "A ms", "B ms", "A ceiling", "B ceiling", "B is", least_width=19, gap=1)
        table.add_column("", no_wrap=True)
        for case in dict.fromkeys(row.case for row in rows if row.shape == shape):
            table.add_row(Text(case, style="bold"))
            for row in rows:
                if (row.shape, row.case) == (shape, case):
                    table.add_row(*_cells(row, longest))
        print_part(console, table)
    console.print()
    for shape in shapes:
        for letter in LETTERS:
            for text in _missing(rows, shape, letter):
                console.print(Text(text, style="yellow"), soft_wrap=not console.is_terminal)
    print_part(console, Text("B is: A's median over B's, how many times as fast B is.", style="dim"))


def _of(row: Row, letter: str) -> Mapping[str, Any] | None:
    return row.first if letter == "A" else row.second


def _lacks(rows: list[Row], shape: str, letter: str) -> bool:
    """Whether a document has nothing at a shape."""
    return all(_of(row, letter) is None for row in rows if row.shape == shape)


def _missing(rows: list[Row], shape: str, letter: str) -> list[str]:
    """Return in words what a document lacks at a shape, if anything."""
    if _lacks(rows, shape, letter):
        return [f"not in {letter}: anything at {shape}"]
    lacking: dict[str, list[str]] = {}
    for row in rows:
        if row.shape == shape and _of(row, letter) is None:
            lacking.setdefault(row.case, []).append(row.side)
    told = ", ".join(f"{case} ({', '.join(sides)})" for case, sides in lacking.items())
    return [f"not in {letter} at {shape}: {told}"] if told else []


def _cells(row: Row, longest: float) -> list[str | Text]:
    times = [milliseconds(each["median_s"]) if each else MISSING for each in _both(row)]
    shares = [
        f"{each['share_of_ceiling']:.0%}" if each and each["share_of_ceiling"] else MISSING for each in _both(row)
    ]
    ratio = f"{row.ratio:.2f}x" if row.ratio else MISSING
    bar = "█" * max(1, round(BAR * row.ratio / longest)) if row.ratio else ""
    return [f"  {row.side}", *times, *shares, ratio, Text(bar, style="green" if (row.ratio or 0) > 1 else "dim")]


def _both(row: Row) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    return row.first, row.second


def _timed(document: Mapping[str, Any]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {
        (f"N={shape['N']:,} H={shape['H']:,} V={shape['V']:,}", case["name"], side["name"]): side
        for shape in document["shapes"]
        for case in shape["cases"]
        for side in case["sides"]
        if side["median_s"]
    }


def _described(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"{machine['device']} ({machine['backend']}, {machine['arch']}), {document['dtype']}, "
        f"GEMM {rate(document['ceiling']['flops_per_s'], 'F')}; torch {machine['torch']}, hwgrpo {machine['hwgrpo']}"
    )
