"""Report of inspected data files, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hwgrpo.bench.terminal import fact_grid, make_console, number_table, print_part
from hwgrpo.data.image_rows import COLUMNS as IMAGE_COLUMNS
from hwgrpo.data.inspection import BadRow, FileReport, ImageCounts, Inspection, Lengths
from hwgrpo.data.prompt_findings import finding_notes
from hwgrpo.errors import escaped
from hwgrpo.support.text import one_line, terminal_line

NAMED = 10
"""Number of rows of a kind that are listed."""
SPECIFIC = re.compile(r"'[^']*'|\d+")
"""Values in a reason; reasons that differ only in them are one kind."""
NAME = 100
"""Maximum number of characters shown of a source or column."""
SOURCES = 20
"""Maximum number of sources shown."""


def to_json(inspection: Inspection, schema: str) -> str:
    """Return the inspection as JSON."""
    return json.dumps({"schema": schema, **asdict(inspection)}, indent=1, ensure_ascii=False)


def show_inspection(inspection: Inspection) -> None:
    """Print a report of each file, then the prompts that they share."""
    console = make_console()
    for number, file in enumerate(inspection.files):
        if number:
            console.print()
        _show_file(console, file, inspection.max_prompt_tokens)
    if len(inspection.files) > 1:
        console.print()
        _show_overlaps(console, inspection)


def _show_file(console: Console, file: FileReport, max_prompt_tokens: int) -> None:
    heading = Text(f"{file.name}: {file.rows:,} rows, ", style="bold")
    heading.append(f"{len(file.bad):,} bad" if file.bad else "none bad", style="red" if file.bad else "green")
    print_part(console, heading)
    print_part(console, fact_grid(_facts(file)))
    if file.characters is not None:
        console.print()
        print_part(console, _length_table(file))
    if file.overlong:
        text = f"{file.overlong:,} prompts are longer than data.max_prompt_tokens={max_prompt_tokens:,}."
        print_part(console, Text(text, style="yellow"))
    for note in finding_notes("", file.findings):
        print_part(console, Text(note, style="yellow"))
    if file.repeats:
        console.print()
        text = f"{len(file.repeats):,} {_rows(len(file.repeats))} the prompt of an earlier row"
        print_part(console, Text(text, style="yellow"))
        repeats = [[place.removeprefix(f"{file.name}, ") for place in astuple(each)] for each in file.repeats[:NAMED]]
        lines = [f"{later} repeats {earlier}" for later, earlier in repeats]
        more = [f"and {len(file.repeats) - NAMED:,} more"] if len(file.repeats) > NAMED else []
        print_part(console, Text("\n".join(lines + more)))
    if file.bad:
        console.print()
        print_part(console, _bad_table(file))


def _facts(file: FileReport) -> dict[str, str]:
    known = {"prompt", *file.ground_truths, *(key.partition(".")[0] for key in file.ground_truths)}
    known |= {"data_source", *(IMAGE_COLUMNS if file.images is not None else ())}
    rest = [column for column in file.columns if column not in known]
    facts = {
        "prompt": _counts(file.prompts) or "none readable",
        "ground truth": _counts(file.ground_truths) or "in no row",
        "data_source": _counts(file.sources) or "none",
        "images": _images(file.images),
        "other columns": ", ".join(escaped(column, NAME) for column in rest) or "none",
    }
    if file.images is None:
        del facts["images"]
    rewards = []
    for each in file.judged:
        if each.why_not is not None:
            rewards.append(f"{each.reward}: not run, {one_line(each.why_not)}")
            continue
        if each.unanswered:
            rewards.append(f"{each.reward}: can score {each.scored:,} of the {each.tried:,} rows")
            continue
        line = f"{each.reward}: scores {each.scored:,} of the {each.tried:,} answers tried"
        rewards.append(line + (f", fails on {each.failed:,}" if each.failed else ""))
    facts["reward"] = "\n".join(rewards) or "none run (--reward NAME or --recipe RECIPE)"
    return facts


def _images(images: ImageCounts | None) -> str:
    """Return `1 in 12 prompts, 2 in 3 prompts; widths 24 to 800, heights 600 pixels`."""
    if images is None:
        return ""
    per_prompt = ", ".join(f"{number} in {rows:,} prompts" for number, rows in images.per_row.items())
    return f"{per_prompt}; widths {_range(images.widths)}, heights {_range(images.heights)} pixels"


def _range(sides: Lengths) -> str:
    return f"{sides.min:,}" if sides.min == sides.max else f"{sides.min:,} to {sides.max:,}"


def _counts(counts: Mapping[str, int]) -> str:
    """Return `a (12), b (3)`, or `a` where all rows are the same."""
    if len(counts) == 1:
        return escaped(next(iter(counts)), NAME)
    shown = [f"{escaped(name, NAME)} ({count:,})" for name, count in list(counts.items())[:SOURCES]]
    more = [f"and {len(counts) - SOURCES:,} more"] if len(counts) > SOURCES else []
    return ", ".join(shown + more)


def _length_table(file: FileReport) -> Table:
    table = number_table("prompt length in", "min", "median", "p95", "max")
    for name, lengths in (
        ("characters", file.characters),
        ("tokens, as the model gets it", file.tokens),
        ("of these of images", file.image_tokens),
    ):
        if lengths is not None:
            values = (lengths.min, lengths.median, lengths.p95, lengths.max)
            table.add_row(name, *(f"{value:,}" for value in values))
    return table


def _bad_table(file: FileReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("bad because", overflow="fold", style="red")
    table.add_column("where", overflow="fold")
    kinds: dict[str, list[BadRow]] = {}
    for each in file.bad:
        kinds.setdefault(SPECIFIC.sub("", each.reason), []).append(each)
    for rows in sorted(kinds.values(), key=len, reverse=True):
        example = "e.g. " if len({each.reason for each in rows}) > 1 else ""
        places = [each.place.removeprefix(f"{file.name}, ") for each in rows[:NAMED]]
        more = f" and {len(rows) - NAMED:,} more" if len(rows) > NAMED else ""
        table.add_row(f"{len(rows):,}", Text(example + terminal_line(rows[0].reason)), Text(", ".join(places) + more))
    return table


def _show_overlaps(console: Console, inspection: Inspection) -> None:
    if not inspection.overlaps:
        print_part(console, Text("No prompt is in two of these files.", style="green"))
    for each in inspection.overlaps:
        one, other = each.files
        text = f"{each.prompts:,} {'prompt is' if each.prompts == 1 else 'prompts are'} in both {one} and {other}"
        print_part(console, Text(f"{text}, e.g. {each.places[0]} and {each.places[1]}", style="yellow"))


def _rows(count: int) -> str:
    return "row has" if count == 1 else "rows have"
