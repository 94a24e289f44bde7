"""Fenced blocks of code in a response, found in linear time."""

from __future__ import annotations

import re
from bisect import bisect_right

OPENING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
SHORTEST_FENCE = 3


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of the closed blocks, in order; a block within another is part of its content.

    A block ends at the first line with the same fence alone. Where there is none, its opening line counts as one of a
    shorter fence without a language, and after that as text: models write four backticks and close three.
    """
    lines = text.split("\n")
    closings: dict[tuple[str, int], list[int]] = {}
    for number, line in enumerate(lines):
        fence = line.strip(" \t")
        if len(fence) >= SHORTEST_FENCE and fence[0] in "`~" and fence.count(fence[0]) == len(fence):
            closings.setdefault((fence[0], len(fence)), []).append(number)
    blocks: list[tuple[str, str]] = []
    start = 0
    for number, line in enumerate(lines):
        if number < start or (opening := OPENING.match(line)) is None:
            continue
        longest = len(opening[1])
        for length in range(longest, SHORTEST_FENCE - 1, -1):
            end = _next(closings.get((opening[1][0], length), ()), number)
            if end is not None:
                content = "".join(f"{each}\n" for each in lines[number + 1 : end])
                blocks.append((opening[2] if length == longest else "", content))
                start = end + 1
                break
    return blocks


def _next(numbers: list[int] | tuple[int, ...], after: int) -> int | None:
    """Return the first of ascending numbers above another; None if there is none."""
    place = bisect_right(numbers, after)
    return numbers[place] if place < len(numbers) else None
