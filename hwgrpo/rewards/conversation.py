"""Prompts of rewards by models: as chat messages and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.values import Prompt


def conversation(prompt: Prompt, response: str) -> list[dict[str, Any]]:
    """Return prompt and response as chat messages; a prompt of plain text is a user's message.

    A response that continues the prompt's last message is one message with it: templates refuse two in a row, or
    write a turn that nobody has taken. Where an image stands, the text has `[image]`: models of rewards read text.
    """
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    if messages[-1]["role"] == "assistant":
        messages, response = messages[:-1], _text(messages[-1]) + response
    in_text = [message if isinstance(message["content"], str) else _in_text(message) for message in messages]
    return [*map(dict, in_text), {"role": "assistant", "content": response}]


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt without the policy's chat template: its only message, or paragraphs `role: content`."""
    if prompt.messages is None:
        return prompt.text
    if len(prompt.messages) == 1:
        return _text(prompt.messages[0])
    return "\n\n".join(f"{message['role']}: {_text(message)}" for message in prompt.messages)


def _in_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose images, if it has any, are text."""
    shows = any(part.get("type") == "image" for part in message["content"] or ())
    return {**message, "content": _text(message)} if shows else message


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of texts, or None."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join("[image]" if part.get("type") == "image" else part.get("text", "") for part in content or ())
