"""Write the tables of docs/from-verl.md and from-trl.md, from the rows that the importers read.

`python scripts/generate_peer_tables.py` writes them; --check exits with 1 if a page is out of date.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.peer_row import UNSET, PeerRow
from hwgrpo.migrate.tables.trl_names import TRL
from hwgrpo.migrate.tables.verl_names import VERL

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"from-verl.md": VERL, "from-trl.md": TRL}
MARK = "<!-- below: python scripts/generate_peer_tables.py -->\n"


def page_tables(names: PeerNames) -> str:
    """Return the tables of a project."""
    project, rows = names.project, names.rows.values()
    mapped = [row for row in rows if row.kind in ("same", "joint")]
    parts = ["## Every key\n\n### Mapped\n\n", f"| {project} | here | what differs; values |\n|---|---|---|\n"]
    parts += [f"| `{row.key}` | {_here(row)} | {_text(_differs(row))} |\n" for row in mapped]
    parts.append(
        f"\n### Refused unless neutral\n\n| {project} | neutral | reason | nearest here |\n|---|---|---|---|\n"
    )
    parts += [
        f"| {keys} | {', '.join(map(_value, row.neutral))} | {_text(row.note)} | {_text(row.instead)} |\n"
        for keys, row in _joined(row for row in rows if row.kind == "refused")
    ]
    parts.append(
        f"\n### Without meaning here\n\nAccepted, and listed with this reason.\n\n| {project} | reason |\n|---|---|\n"
    )
    parts += [
        f"| {keys} | {_text(row.note)} |\n" for keys, row in _joined(row for row in rows if row.kind == "ignored")
    ]
    parts.append("\n### Other names\n\n| name | read as | |\n|---|---|---|\n")
    for others, why in ((names.older, "an older name"), (names.tutorials, f"in tutorials alone; {project} refuses it")):
        parts += [f"| `{name}` | `{known}` | {why} |\n" for name, known in others.items()]
    return "".join(parts)


def _joined(rows: Iterable[PeerRow]) -> Iterator[tuple[str, PeerRow]]:
    """Yield rows of the same reason as one, with the names of all."""
    reasons: dict[tuple[Any, ...], list[PeerRow]] = {}
    for row in rows:
        reasons.setdefault((row.note, row.instead, repr(row.neutral)), []).append(row)
    for listed in reasons.values():
        yield ", ".join(f"`{row.key}`" for row in listed), listed[0]


def _here(row: PeerRow) -> str:
    return ", ".join(f"`{each}`" for each in row.here.split(", ") if each)


def _differs(row: PeerRow) -> str:
    """Return a row's note, its default and its values."""
    renamed = [f"{each} is {here.partition(' | ')[0]}" for each, here in row.values.items() if here and here != each]
    refused = [each for each, here in row.values.items() if not here]
    default = "" if row.default is UNSET or row.default is None else f"default {_value(row.default)}"
    values = ", ".join(renamed)
    without = f"refused: {', '.join(refused)}" if refused else ""
    return "; ".join(each for each in (row.note, values, without, default) if each)


def _value(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _text(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the pages, or compare them."""
    for name, names in PAGES.items():
        page = DOCS / name
        before, mark, now = page.read_text(encoding="utf-8").partition(MARK)
        if "--check" not in sys.argv[1:]:
            page.write_text(before + MARK + page_tables(names), encoding="utf-8")
        elif not mark or now != page_tables(names):
            print(f"docs/{name} is out of date; run `python scripts/generate_peer_tables.py`")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
