"""Write docs/config.md, the reference of all settings, from the schema.

`python scripts/generate_config_reference.py` writes it; --check exits with 1 if the page is out of date.
"""

import sys
from itertools import groupby
from pathlib import Path

from hwgrpo.config.document import Entry, entries
from hwgrpo.config.recipe_files import presets

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
INTRODUCTION = """\
# Config reference

Every setting, generated from `hwgrpo/config/schema.py`. Do not edit this page: run
`python scripts/generate_config_reference.py`. In a terminal `hwgrpo config` prints the same, `hwgrpo config optim.lr`
prints one setting and `hwgrpo train RECIPE --print-config` prints the settings of a run.

A recipe (YAML) states what differs from the defaults; `key=value` on the command line overrides the recipe.
`functions[]` means each entry of a list. Setting a key that has no effect is an error: the column "used with" names
the settings that make it effective. [settings.md](settings.md) helps you to choose.
"""
PRESETS = """\
## Presets

What `algorithm.preset` sets, from the files in `configs/presets`.

"""
TOP_LEVEL = "plugins"
"""Heading of the settings outside of all sections."""


def reference() -> str:
    """Return the page."""
    sections = groupby(entries(), key=lambda entry: entry.key.partition(".")[0] if "." in entry.key else TOP_LEVEL)
    pages = [f"## {name}\n\n{_table(list(group))}" for name, group in sections]
    return "\n".join([INTRODUCTION, *pages, PRESETS + _presets()])


def _presets() -> str:
    rows = [(f"`{p.name}`", p.source, " ".join(f"`{each}`" for each in p.settings)) for p in presets()]
    lines = [("preset", "method and source", "settings"), ("---",) * 3, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _table(settings: list[Entry]) -> str:
    header = ("setting", "default", "type", "meaning", "used with")
    rows = [(f"`{s.key}`", f"`{s.default}`", _type(s), s.doc, f"`{s.used_by}`" if s.used_by else "") for s in settings]
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def _type(setting: Entry) -> str:
    kinds = ["null" if kind == "None" else kind for kind in setting.type.split(" | ")]
    named = " or ".join(f"`{kind}`" for kind in kinds)
    return f"{named}; {setting.allowed}" if setting.allowed else named


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == reference():
            return 0
        print("docs/config.md is out of date; run `python scripts/generate_config_reference.py`")
        return 1
    PAGE.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
