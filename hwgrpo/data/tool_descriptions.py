"""Tools in a system message, for chat templates that show none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.data.row_schema import Message, message_text

FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
"""How the model is asked to write calls: the call format `hermes`."""


def with_tools_described(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation whose system message describes tools.

    Args:
        messages: the conversation.
        tools: JSON schemas of the tools.
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You may call these functions:\n{functions}\nTo call one, write {FORM}. Its result is the next message."
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{message_text(messages[0])}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
