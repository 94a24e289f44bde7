"""Report of a conversion: counts, rows left out with reasons, the first row, and settings to train on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hwgrpo.bench.terminal import fact_grid, make_console, number_table, print_part
from hwgrpo.data.convert import Converted
from hwgrpo.data.dataset_files import Copy
from hwgrpo.data.duplicates import NAMED, Places
from hwgrpo.data.published import Conversion, Published

PREVIEW = 600
"""Maximum number of characters of a text in the preview."""


def show_converted(
    dataset: Conversion, copy: Copy, files: Mapping[str, Path], converted: Mapping[str, Converted]
) -> None:
    """Print the report of a conversion.

    Args:
        dataset: how rows were converted.
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
    for split in dataset.splits if isinstance(dataset, Published) else ():
        if split not in converted:
            text = f"The source has no {split} split; no {split}.parquet was written."
            print_part(console, Text(text, style="yellow"))
    reasons = _reasons(converted)
    if reasons:
        console.print()
        print_part(console, _reason_table(reasons))
    split, first = next(iter(converted.items()))
    console.print()
    print_part(console, Text(f"the first row of {split}", style="bold"))
    print_part(console, _row_grid(first.rows[0]))
    console.print()
    print_part(console, Text("to train on it", style="bold"))
    facts = {"data.train": str(files["train"])} if "train" in files else {}
    held_out = next((files[split] for split in ("validation", "test") if split in files), None)
    facts |= {} if held_out is None else {"data.validation": str(held_out)}
    facts |= {} if dataset.reward is None else {"reward.functions": f"[{dataset.reward}]"}
    print_part(console, fact_grid(facts))


def _counts(files: Mapping[str, Path], converted: Mapping[str, Converted]) -> Table:
    table = number_table("split", "rows read", "written", "dropped", "duplicates", least_width=5)
    table.add_column("file", overflow="fold")
    for split, each in converted.items():
        repeated = sum(places.count for places in each.repeated.values())
        left_out = [Text(f"{count:,}", style="yellow" if count else "") for count in (len(each.dropped), repeated)]
        table.add_row(split, f"{each.read:,}", f"{len(each.rows):,}", *left_out, Text(str(files[split])))
    return table


def _reasons(converted: Mapping[str, Converted]) -> dict[str, Places]:
    """Return reason -> the rows that were left out for it: first those that could not be converted."""
    reasons: dict[str, Places] = {}
    for split in converted.values():
        for each in split.dropped:
            reasons.setdefault(each.reason, Places()).add(each.place)
    reasons = dict(sorted(reasons.items(), key=lambda item: -item[1].count))
    for split in converted.values():
        for reason, places in split.repeated.items():
            reasons[reason] = reasons.get(reason, Places()) + places
    return reasons


def _reason_table(reasons: Mapping[str, Places]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("left out because", overflow="fold", style="yellow")
    table.add_column("where", overflow="fold")
    for reason, places in reasons.items():
        more = f"\nand {places.count - NAMED:,} more" if places.count > NAMED else ""
        table.add_row(f"{places.count:,}", Text(reason), Text("\n".join(places.first) + more))
    return table


def _row_grid(row: Mapping[str, Any]) -> Table:
    facts: dict[str, str] = {}
    for name, value in row.items():
        if name == "images":
            facts[name] = ", ".join(f"{len(image['bytes']):,} bytes" for image in value)
        elif isinstance(value, list):
            facts[name] = "\n".join(f"{message['role']}: {shortened(message['content'])}" for message in value)
        elif isinstance(value, Mapping):
            facts |= {f"{name}.{key}": shortened(str(part)) for key, part in value.items()}
        else:
            facts[name] = shortened(str(value))
    return fact_grid(facts)


def shortened(text: str, limit: int = PREVIEW) -> str:
    """Return a text, cut to `limit` characters with the number of those left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"
