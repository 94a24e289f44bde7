"""Report of a conversion: counts, dropped rows with reasons, the first row, and settings to train on it."""

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
"""Number of dropped rows and skipped files that are listed."""
PREVIEW = 600
"""Maximum number of characters of a text in the preview."""


def show_converted(
    dataset: Published, copy: Copy, files: Mapping[str, Path], converted: Mapping[str, Converted]
) -> None:
    """Print the report of a conversion.

    Args:
        dataset: the published dataset.
        copy: the copy that was read.
        files: split -> file written.
        converted: split -> rows written and dropped.
    """
    console = make_console()
    print_part(console, Text(f"{dataset.title} from {copy.source}", style="bold"))
    for reason, names in copy.skipped.items():
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        print_part(console, Text(f"not read, {reason}: {shown}", style="dim"))
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
    """Return a table of dropped rows: count, reason and first places."""
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
    """Return a text, cut to `limit` characters with the number of those left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"
