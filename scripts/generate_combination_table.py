"""Write into docs/grpo.md which settings of the algorithm exclude each other, by asking the check of a run.

`python scripts/generate_combination_table.py` writes the table; --check exits with 1 if it is out of date.
"""

import re
import sys
import textwrap
from pathlib import Path

from hwgrpo.config.combinations import Exclusion, exclusions, refused_values, summary

PAGE = Path(__file__).parents[1] / "docs" / "grpo.md"
BEGIN, END = "<!-- combinations -->", "<!-- end of combinations -->"

INTRODUCTION = (
    "Settings that exclude each other, each with a value for which that holds, are an error with the remedy; "
    "`hwgrpo config combinations` prints these messages. Settings of algorithm.kl need algorithm.kl.coef above 0."
)


def table() -> str:
    """Return the block between the markers."""
    text = re.sub(r"algorithm\.[a-z_.]+[a-z]", r"`\g<0>`", f"{summary()} {INTRODUCTION}")
    head = textwrap.fill(text, 125, break_on_hyphens=False, break_long_words=False)
    rows = "".join(f"| {' | '.join(_row(each))} |\n" for each in exclusions())
    return f"{head}\n\n| setting | not with | reason |\n|---|---|---|\n{rows}"


def _row(each: Exclusion) -> tuple[str, str, str]:
    return f"`{each.setting}`", f"`{refused_values(each)}`", each.reason


def page(text: str) -> str:
    """Return the page's text with the present table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(text), encoding="utf-8")
        return 0
    if text == page(text):
        return 0
    print("docs/grpo.md is out of date; run `python scripts/generate_combination_table.py`")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
