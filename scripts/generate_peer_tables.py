"""Write the tables of docs/from-verl.md, from the rows that the importer reads.

`python scripts/generate_peer_tables.py` writes them; --check exits with 1 if the page is out of date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwgrpo.peer_tables.peer_row import UNSET, PeerRow
from hwgrpo.peer_tables.verl_ignored import IGNORED
from hwgrpo.peer_tables.verl_mapped import MAPPED
from hwgrpo.peer_tables.verl_names import OLDER, TUTORIALS
from hwgrpo.peer_tables.verl_refused import REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "from-verl.md"
MARK = "<!-- below: python scripts/generate_peer_tables.py -->\n"
INTRODUCTION = """\
## Every key

"""


def tables() -> str:
    """Return the tables."""
    parts = [INTRODUCTION, "### Mapped\n\n| verl | here | what differs; values |\n|---|---|---|\n"]
    parts += [f"| `{row.key}` | {_here(row)} | {_text(_differs(row))} |\n" for row in MAPPED]
    parts.append("\n### Refused unless neutral\n\n| verl | neutral | reason | nearest here |\n|---|---|---|---|\n")
    parts += [
        f"| {keys} | {', '.join(map(_value, row.neutral))} | {_text(row.note)} | {_text(row.instead)} |\n"
        for keys, row in _joined(REFUSED)
    ]
    parts.append(
        "\n### Without meaning here\n\nAccepted, and listed with this reason.\n\n| verl | reason |\n|---|---|\n"
    )
    parts += [f"| {keys} | {_text(row.note)} |\n" for keys, row in _joined(IGNORED)]
    parts.append("\n### Other names\n\n| name | read as | |\n|---|---|---|\n")
    for names, why in ((OLDER, "an older name"), (TUTORIALS, "in tutorials alone; verl refuses it")):
        parts += [f"| `{name}` | `{known}` | {why} |\n" for name, known in names.items()]
    return "".join(parts)


def _joined(rows: tuple[PeerRow, ...]) -> Iterator[tuple[str, PeerRow]]:
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
    """Write the page, or compare it."""
    before, mark, now = PAGE.read_text(encoding="utf-8").partition(MARK)
    if "--check" in sys.argv[1:]:
        if mark and now == tables():
            return 0
        print("docs/from-verl.md is out of date; run `python scripts/generate_peer_tables.py`")
        return 1
    PAGE.write_text(before + MARK + tables(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
