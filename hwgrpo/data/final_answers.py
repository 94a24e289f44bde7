"""The final answer in a worked solution: after `####`, or in the last `\\boxed{}`."""

from __future__ import annotations

import re

from hwgrpo.errors import DataError

MARK = "####"
NUMBER = re.compile(r"\s*(-?)\s*\$?\s*(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
CONTINUES = re.compile(r"\w|[ \t]*[-+*/^:\u00d7]|\.\d")
"""What follows a number that is only the beginning of the answer: `3/4`, `2^5`, `12:30`, `7th`, `1.2.3`."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def number_after_mark(solution: str) -> str:
    """Return the number after the last `####`, without thousands' commas and `$`: `1080` of `#### $1,080`.

    Raises:
        DataError: there is no mark, or it is not followed by a single number.
    """
    _, mark, tail = solution.rpartition(MARK)
    if not mark:
        raise DataError(f"no {MARK}")
    match = NUMBER.match(tail)
    if match is None or CONTINUES.match(tail, match.end()):
        raise DataError(f"no single number after {MARK}")
    sign, digits = match.groups()
    if sign and digits.startswith("-"):
        raise DataError(f"no single number after {MARK}")
    return sign + digits.replace(",", "")


def last_boxed(solution: str) -> str:
    """Return the content of the last `\\boxed{}` or `\\fbox{}`, with balanced braces, or of `\\boxed 7$`.

    Raises:
        DataError: there is none, its braces do not close, or it is empty.
    """
    boxes = list(BOX.finditer(solution))
    if not boxes:
        raise DataError("no \\boxed{}")
    start = boxes[-1].end()
    if solution[start : start + 1] == "{":
        content = _braced(solution, start)
        if content is None:
            raise DataError("the braces of the last \\boxed{} do not close")
    else:
        content = re.split(r"[$\n]", solution[start:], maxsplit=1)[0]
    if not content.strip():
        raise DataError("the last \\boxed{} is empty")
    return content.strip()


def _braced(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing one; `\\{` and `\\}` do not count."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # whatever follows a backslash is part of a command
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None
