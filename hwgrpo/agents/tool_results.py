"""What a tool returns as the text that the model reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hwgrpo.agents.action import ToolResult

FAILURES = ("error", "timeout", "died", "unknown", "malformed")
"""Kinds of `ToolResult.failure`."""


def pack_result(value: Any, max_chars: int, side: str) -> dict[str, Any]:
    """Return the fields of a `ToolResult` for what a tool returned: JSON.

    Text is itself. Numbers, None, lists and dicts are their JSON, so that None is "null". A `ToolResult` passes with
    its reward. Anything else is a failure.

    Args:
        value: what the tool returned.
        max_chars: longest text, without the marker of what was left out.
        side: that is left out of a longer text: left, middle, right.
    """
    reward, failure = 0.0, ""
    if isinstance(value, ToolResult):
        value, reward, failure = value.text, value.reward, value.failure
        failure = failure if failure in ("", *FAILURES) else "error"
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        return {"text": f"Error: the tool gave the reward {reward!r}, which is no finite number", "failure": "error"}
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        kind = type(value).__name__
        text = f"Error: the tool returned a value of type {kind}, which is neither text nor a value that JSON has"
        failure = "error"
    return {"text": shorten(text, max_chars, side), "failure": failure, "reward": float(reward)}


def unpack_result(fields: Mapping[str, Any], seconds: float) -> ToolResult:
    """Return the result of the fields of `pack_result`, with text that a tokenizer accepts."""
    text = str(fields["text"]).encode("utf-8", "replace").decode()  # half of a surrogate pair becomes "?"
    return ToolResult(text, fields.get("failure", ""), seconds, fields.get("reward", 0.0))


def shorten(text: str, max_chars: int, side: str) -> str:
    """Return a text of at most `max_chars` characters and, where it was longer, a marker of how many were left out.

    Example:
        >>> shorten("0123456789", 4, "middle")
        '01...[6 characters left out]...89'
    """
    if len(text) <= max_chars:
        return text
    marker = f"...[{len(text) - max_chars} characters left out]..."
    start = {"left": 0, "middle": (max_chars + 1) // 2, "right": max_chars}[side]
    end = max_chars - start
    return text[:start] + marker + text[len(text) - end :]
