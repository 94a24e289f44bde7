"""Documents of `hwgrpo bench kernels` side by side: two to four chips."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from hwgrpo.bench.kernels.kernel_result import SCHEMA
from hwgrpo.bench.kernels.kernel_tables import MISSING, milliseconds, rate
from hwgrpo.bench.terminal import make_console, number_table, print_part
from hwgrpo.errors import ConfigError

LETTERS = "ABCD"
"""Names of the documents, in the order of the arguments."""
NAME = 26
"""Characters of the longest name in a table; longer ones would take the room of the numbers."""
BAR = 10
"""Characters of the longest bar."""


@dataclass(frozen=True)
class Row:
    """One way to compute a case at one shape, in all documents.

    Args:
        shape, case, side: which.
        found: result of `side` in each document; None where it has no such row, or no time.
    """

    shape: str
    case: str
    side: str
    found: tuple[Mapping[str, Any] | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """How many times as fast as the first each document after it is."""
        first, *others = (None if each is None else each["median_s"] for each in self.found)
        return tuple(first / other if first and other else None for other in others)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object; `ratio` is the second document's."""
        parts = (each and {key: each[key] for key in ("median_s", "share_of_ceiling")} for each in self.found)
        names = ("ratio", "ratio_c", "ratio_d")
        return {
            "shape": self.shape,
            "case": self.case,
            "side": self.side,
            **dict(zip(LETTERS.lower(), parts)),
            **dict(zip(names, self.ratios)),
        }


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


def compare_documents(*documents: Mapping[str, Any]) -> list[Row]:
    """Return a row for everything that some document timed, in the order of the first, then of those after it.

    Shapes are the same when their sizes are, whatever they are called.
    """
    timed = [_timed(document) for document in documents]
    return [
        Row(*key, tuple(each.get(key) for each in timed))
        for key in dict.fromkeys(key for each in timed for key in each)
    ]


def shared_shapes(rows: Sequence[Row]) -> list[str]:
    """Return the shapes at which two documents or more have something."""
    return [shape for shape in dict.fromkeys(row.shape for row in rows) if len(_having(rows, shape)) > 1]


def show_comparison(names: Sequence[str], documents: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Print documents side by side.

    Args:
        names: names of the documents.
        documents: from `read_document`.
        rows: from `compare_documents`.
    """
    console = make_console()
    for letter, name, document in zip(LETTERS, names, documents):
        console.print(Text(f"{letter}  {name}: {described(document)}"), soft_wrap=not console.is_terminal)
    if unlike(documents):
        console.print(Text("note: dtypes or clocks differ, so the ratios compare unlike things", style="yellow"))
    letters = LETTERS[: len(documents)]
    two = len(documents) == 2
    shared = shared_shapes(rows)
    if not shared:
        note = "the two have no shape in common" if two else "no two of them have a shape in common"
        console.print()
        console.print(Text(note, style="yellow"))
    longest = max((ratio or 0 for row in rows for ratio in row.ratios), default=0)
    columns = [f"{letter} ms" for letter in letters]
    columns += [f"{letter} ceiling" for letter in letters] if two else []  # more would not fit into 80 columns
    columns += [f"{letter} is" for letter in letters[1:]]
    for shape in shared:
        console.print()
        console.print(Text(shape, style="bold"))
        table = number_table("", *columns, least_width=19, gap=1)
        table.add_column("", no_wrap=True)
        for case in dict.fromkeys(row.case for row in rows if row.shape == shape):
            table.add_row(Text(shortened(case, NAME), style="bold"))
            for row in rows:
                if (row.shape, row.case) == (shape, case):
                    table.add_row(*(_cells_of_two(row, longest) if two else _times(row) + _ratios(row)))
        print_part(console, table)
    console.print()
    for shape in dict.fromkeys(row.shape for row in rows):
        for number in range(len(documents)):
            for text in _missing(rows, shape, number):
                console.print(Text(text, style="yellow"), soft_wrap=not console.is_terminal)
    legend = f"{' is, '.join(letters[1:])} is: A's median over its own, how many times as fast as A it is."
    legend = "B is: A's median over B's, how many times as fast B is." if two else legend
    print_part(console, Text(legend, style="dim"))


def described(document: Mapping[str, Any]) -> str:
    """Return the machine of a document, in one line."""
    machine = document["machine"]
    return (
        f"{machine['device']} ({machine['backend']}, {machine['arch']}), {document['dtype']}, "
        f"GEMM {rate(document['ceiling']['flops_per_s'], 'F')}; torch {machine['torch']}, hwgrpo {machine['hwgrpo']}"
    )


def shortened(text: str, most: int) -> str:
    """Return a name cut to a number of characters, without control characters."""
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def unlike(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether they were measured in several dtypes or by several clocks."""
    return len({(document["dtype"], document["clock"]) for document in documents}) > 1


def _having(rows: Sequence[Row], shape: str) -> set[int]:
    """Return the numbers of the documents that have something at a shape."""
    return {
        number for row in rows if row.shape == shape for number, each in enumerate(row.found) if each is not None
    }  # fmt: skip


def _missing(rows: Sequence[Row], shape: str, number: int) -> list[str]:
    """Describe the cases that a document lacks at a shape; "" if none."""
    if number not in _having(rows, shape):
        return [f"not in {LETTERS[number]}: anything at {shape}"]
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.shape == shape and row.found[number] is None:
            missing.setdefault(row.case, []).append(row.side)
    cases = ", ".join(f"{case} ({', '.join(sides)})" for case, sides in missing.items())
    return [f"not in {LETTERS[number]} at {shape}: {cases}"] if missing else []


def _times(row: Row) -> list[str | Text]:
    return [
        f"  {shortened(row.side, NAME - 2)}",
        *(milliseconds(each["median_s"]) if each else MISSING for each in row.found),
    ]


def _ratios(row: Row) -> list[str | Text]:
    return [
        Text(f"{ratio:.2f}x" if ratio else MISSING, style="green" if (ratio or 0) > 1 else "") for ratio in row.ratios
    ]


def _cells_of_two(row: Row, longest: float) -> list[str | Text]:
    shares = (each and each["share_of_ceiling"] for each in row.found)
    (ratio,) = row.ratios
    bar = "█" * max(1, round(BAR * ratio / longest)) if ratio else ""
    return [
        *_times(row),
        *(f"{share:.0%}" if share else MISSING for share in shares),
        f"{ratio:.2f}x" if ratio else MISSING,
        Text(bar, style="green" if (ratio or 0) > 1 else "dim"),
    ]


def _timed(document: Mapping[str, Any]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {
        (f"N={shape['N']:,} H={shape['H']:,} V={shape['V']:,}", case["name"], side["name"]): side
        for shape in document["shapes"]
        for case in shape["cases"]
        for side in case["sides"]
        if side["median_s"]
    }
