"""Tables: coloured on a terminal, plain text elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hwgrpo.support.text import one_line

WIDTH = 100
"""Columns where there is no terminal to ask."""


def make_console() -> Console:
    """Return a console as wide as the terminal, or of `WIDTH` columns without one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_part(console: Console, part: RenderableType) -> None:
    """Print, on a terminal as it is, else without the blanks that fill up lines."""
    if console.is_terminal:
        console.print(_Neutral(part))
        return
    with console.capture() as captured:
        console.print(_Neutral(part))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@dataclass(frozen=True)
class _Neutral:
    """Printable whose texts contain no control characters, whatever the data."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            text, style, control = segment
            yield segment if control else Segment("\n".join(map(one_line, text.split("\n"))), style)


def number_table(first: str, *columns: str, least_width: int = 20, gap: int = 2) -> Table:
    """Return an empty table with a column of names and columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True, min_width=least_width)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def fact_grid(facts: Mapping[str, str]) -> Table:
    """Return a grid of names and texts; long texts are wrapped."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(name, Text(text))
    return grid


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return the facts of `machine_facts` and the number of threads, in one line."""
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    place = f"{machine['device']} ({machine['backend']}, {machine['arch']})"
    return f"{place}, {machine['cores']} cores, {threads}, load {machine['load']}"
