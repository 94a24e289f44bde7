"""Prompts of rewards by models: as chat messages and as text."""

from __future__ import annotations

from hwgrpo.values import Prompt


def conversation(prompt: Prompt, response: str) -> list[dict[str, str]]:
    """Return prompt and response as chat messages; a prompt of plain text is a user's message."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return [*map(dict, messages), {"role": "assistant", "content": response}]


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt without the policy's chat template: its only message, or paragraphs `role: content`."""
    if prompt.messages is None:
        return prompt.text
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)
