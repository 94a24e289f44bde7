"""A conversion as people read it: counts, dropped rows and why, one row, and how to train on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hwgrpo.bench.terminal import fact_grid, make_console, number_table, print_part
from hwgrpo.data.convert import Converted, Dropped
from hwgrpo.data.dataset_files import SPLITS, Copy
from hwgrpo.data.published import Published

NAMED = 10
"""Dropped rows, and files passed over, that are named one by one."""
PREVIEW = 600
"""Characters of a text in the preview."""


def show_converted(
    dataset: Published, copy: Copy, files: Mapping[str, Path], converted: Mapping[str, Converted]
) -> None:
    """Print what was read and written.

    Args:
        dataset: what was converted.
        copy: what was read.
        files: where each split was written to.
        converted: what was written.
    """
    console = make_console()
    print_part(console, Text(f"{dataset.title} from {copy.source}", style="bold"))
    for why, names in copy.skipped.items():
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        print_part(console, Text(f"not read, {why}: {shown}", style="dim"))
    console.print()
    print_part(console, _counts(files, converted))
    for split in SPLITS:
        if split not in converted:
            text = f"The source has no {split} split; no {split}.parquet was written."
            print_part(console, Text(text, style="yellow"))
    dropped = [each for split in converted.values() for each in split.dropped]
    if dropped:
        console.print()
        print_part(console, dropped_table(dropped))
    split, first = next(iter(converted.items()))
    console.print()
    print_part(console, Text(f"the first row of {split}", style="bold"))
    print_part(console, _row_grid(first.rows[0]))
    console.print()
    print_part(console, Text("to train on it", style="bold"))
    names = {"train": "data.train", "test": "data.validation"}
    facts = {names[split]: str(file) for split, file in files.items()}
    print_part(console, fact_grid(facts | {"reward.functions": f"[{dataset.reward}]"}))


def _counts(files: Mapping[str, Path], converted: Mapping[str, Converted]) -> Table:
    table = number_table("split", "rows read", "written", "dropped", least_width=5)
    table.add_column("file", overflow="fold")
    for split, each in converted.items():
        dropped = Text(f"{len(each.dropped):,}", style="yellow" if each.dropped else "")
        table.add_row(split, f"{each.read:,}", f"{len(each.rows):,}", dropped, Text(str(files[split])))
    return table


def dropped_table(dropped: Sequence[Dropped]) -> Table:
    """Return how many rows were dropped for what reason, and where the first of them are."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("dropped because", overflow="fold", style="yellow")
    table.add_column("where", overflow="fold")
    for reason, count in Counter(each.reason for each in dropped).most_common():
        places = [each.place for each in dropped if each.reason == reason]
        more = f"\nand {count - NAMED} more" if count > NAMED else ""
        table.add_row(f"{count:,}", Text(reason), Text("\n".join(places[:NAMED]) + more))
    return table


def _row_grid(row: Mapping[str, Any]) -> Table:
    facts: dict[str, str] = {}
    for name, value in row.items():
        if name == "prompt":
            facts[name] = "\n".join(f"{message['role']}: {shortened(message['content'])}" for message in value)
        elif isinstance(value, Mapping):
            facts |= {f"{name}.{key}": shortened(str(part)) for key, part in value.items()}
        else:
            facts[name] = shortened(str(value))
    return fact_grid(facts)


def shortened(text: str, limit: int = PREVIEW) -> str:
    """Return a text, or as much of it as fits and how much that leaves out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"
