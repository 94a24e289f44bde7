"""How families of models write tool calls: a turn's text -> its calls."""

from __future__ import annotations

from hwgrpo.agents.action import ParsedTurn


def detect_call_format(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows; None where it shows none."""
    return "hermes" if "<tool_call>" in chat_template else None


def hermes(text: str) -> ParsedTurn:
    """Return a turn without calls."""
    return ParsedTurn(text)
