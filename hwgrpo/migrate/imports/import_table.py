"""An import as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hwgrpo.migrate.imports.import_result import TITLES, Imported
from hwgrpo.migrate.imports.recipe_text import compact
from hwgrpo.support.text import one_line

_LEAST, _GAP, _MOST, _MOST_ROWS = 10, "  ", 4000, 500


def table_text(imported: Imported, width: int) -> str:
    """Return the table, one group below the other, in lines of up to `width` characters."""
    lines = []
    for group, title in TITLES.items():
        rows = [
            [*map(_cell, (each.key, compact(each.value), each.becomes, each.note))]
            for each in imported.entries
            if each.group == group
        ]
        if not rows:
            continue
        more = len(rows) - _MOST_ROWS
        header = (f"{imported.project} key", "value", "becomes", "note")
        used = [i for i in range(4) if any(row[i] for row in rows)]
        cells = [[row[i] for i in used] for row in (header, *rows[:_MOST_ROWS])]
        widths = _widths(cells, width)
        lines += ["", f"{title.format(imported.project)} ({len(rows)})"]
        for row in cells:
            lines += _wrapped(row, widths)
        lines += [f"and {more} more"] if more > 0 else []
    return "\n".join(lines[1:]) + "\n"


def _cell(text: str) -> str:
    return one_line(text if len(text) <= _MOST else f"{text[:_MOST]}... ({len(text)} characters)")


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of the columns: what they need, the widest one narrowed until all fit."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = max(width, (_LEAST + len(_GAP)) * len(widths)) - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    return widths


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    columns = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
    height = max(map(len, columns))
    filled = [[*column, *[""] * (height - len(column))] for column in columns]
    lines = zip(*filled, strict=True)
    return [_GAP.join(f"{text:{size}}" for text, size in zip(line, widths, strict=True)).rstrip() for line in lines]
