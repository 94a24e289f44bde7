"""The part of a response that states its answer, found in linear time."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox) ?\{")


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`; the entire text without one."""
    return text.rpartition("</think>")[2]


def tagged(text: str, tag: str = "answer") -> str | None:
    """Return the content of the last complete `<tag>...</tag>`, None without one."""
    before, end, _ = text.rpartition(f"</{tag}>")
    _, start, content = before.rpartition(f"<{tag}>")
    return content if end and start else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, None without one whose braces close."""
    start = next((found.end() for found in reversed(list(BOX.finditer(text)))), None)
    if start is None:
        return None
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None
