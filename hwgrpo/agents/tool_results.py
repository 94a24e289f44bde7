"""What a tool returns as the text and images that the model reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from hwgrpo.agents.action import ToolResult
from hwgrpo.agents.result_blocks import has_blocks, merge_texts, read_blocks, shorten_texts, text_block
from hwgrpo.errors import DataError

FAILURES = ("error", "timeout", "died", "unknown", "malformed")
"""Kinds of `ToolResult.failure`."""


def pack_result(value: Any, max_chars: int, side: str) -> dict[str, Any]:
    """Return the fields of a `ToolResult` for what a tool returned: JSON.

    Text is itself. An image, or a list of images and of blocks of text and images, is blocks (`read_blocks`). Numbers,
    None, other lists and dicts are their JSON, so that None is "null". A `ToolResult` passes with its reward. Anything
    else is a failure.

    Args:
        value: what the tool returned.
        max_chars: longest text, that of all blocks together, without the marker of what was left out.
        side: that is left out of a longer text: left, middle, right.
    """
    reward, failure, more = 0.0, "", ()
    if isinstance(value, ToolResult):
        value, reward, failure, more = value.text, value.reward, value.failure, value.blocks
        failure = failure if failure in ("", *FAILURES) else "error"
    if not _is_finite(reward):
        return {"text": f"Error: the tool gave the reward {reward!r}, which is no finite number", "failure": "error"}
    try:
        blocks = read_blocks(value) if has_blocks(value) else [text_block(_text_of(value))]
        blocks = merge_texts([*blocks, *read_blocks(more)])
    except DataError as error:
        blocks, failure = [text_block(f"Error: {error}")], "error"
    except Exception:  # objects of user code may raise anything
        kind = type(value).__name__
        said = f"Error: the tool returned a value of type {kind}, which is neither text, images nor what JSON has"
        blocks, failure = [text_block(said)], "error"
    blocks = shorten_texts(blocks, max_chars, side)
    text = blocks.pop(0)["text"] if blocks and blocks[0]["type"] == "text" else ""
    return {"text": text, "failure": failure, "reward": float(reward), "blocks": blocks}


def unpack_result(fields: Mapping[str, Any], seconds: float) -> ToolResult:
    """Return the result of the fields of `pack_result`, with text that a tokenizer accepts.

    Invalid fields, which a tool's process may send, are a failed result.
    """
    text, failure, reward = (
        fields.get(name, default) for name, default in (("text", None), ("failure", ""), ("reward", 0.0))
    )
    try:
        blocks = read_blocks(fields.get("blocks", ()))
    except Exception:  # it must not end the thread that reads the results of all calls
        text, blocks = None, []
    if not isinstance(text, str) or not isinstance(failure, str) or not _is_finite(reward):
        return ToolResult("Error: the tool sent an invalid result", "error", seconds)
    encodable = [text_block(_encodable(block["text"])) if block["type"] == "text" else block for block in blocks]
    return ToolResult(_encodable(text), failure, seconds, reward, tuple(encodable))


def shorten(text: str, max_chars: int, side: str) -> str:
    """Return a text of at most `max_chars` characters and, where it was longer, a marker of how many were left out.

    Example:
        >>> shorten("0123456789", 4, "middle")
        '01...[6 characters left out]...89'
    """
    return "".join(block["text"] for block in shorten_texts([text_block(text)], max_chars, side))


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_finite(reward: Any) -> bool:
    return isinstance(reward, int | float) and abs(reward) <= sys.float_info.max  # false for NaN


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair becomes "?"
