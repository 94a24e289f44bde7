"""Trajectories as text for a terminal: calls as `name(key=value)`, and the turns of an outcome in few words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from hwgrpo.observe.image_text import content_text, count_images

if TYPE_CHECKING:
    from hwgrpo.values import Thumbnail

ROLES = {"assistant": "policy"}
"""Roles that have another name here."""
SHORT = 100
"""Characters of a message in `compact_turns`."""


def call_text(name: str, arguments: Any) -> str:
    """Return a tool call as `name(key="value", other=3)`."""
    if not isinstance(arguments, Mapping):
        return f"{name}({'' if arguments is None else _json(arguments)})"
    return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})"


def message_text(message: Mapping[str, Any], thumbnails: Sequence[Thumbnail] = ()) -> str:
    """Return the text of a chat message, with its tool calls on lines of their own.

    Args:
        message: text, or parts with images, for which a label stands.
        thumbnails: of its images; without them labels have no sizes.
    """
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [call_text(each["name"], each["arguments"]) for each in functions]
    return "\n".join([*filter(None, [content_text(message.get("content"), thumbnails)]), *calls])


def speaker(message: Mapping[str, Any]) -> str:
    """Return whose message it is: `policy`, `user`, or `tool search`."""
    role = str(message.get("role"))
    return " ".join(filter(None, (ROLES.get(role, role), message.get("name"))))


def compact_turns(outcome: Mapping[str, Any], thumbnails: Sequence[Thumbnail] = ()) -> str | None:
    """Return the turns of a trajectory, one line for each message, its middle left out where it is long.

    Args:
        outcome: of a trajectory (`hwgrpo.agents.episode.OUTCOME`), or {}.
        thumbnails: of the images that were observed.

    Returns:
        None where there are no turns beside a single plain one, which is the response itself.

    Example:
        >>> turns = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "No."}]
        >>> print(compact_turns({"messages": turns, "turn_rewards": [-1.0], "stop": "max_turns"}))
        policy: 5 [-1]
        user: No.
        (max_turns)
    """
    messages = outcome.get("messages") or ()
    if not messages or (len(messages) == 1 and not messages[0].get("tool_calls")):
        return None
    rewards, remaining, lines = iter(outcome["turn_rewards"]), iter(thumbnails), []
    for message in messages:
        reward = next(rewards, 0.0) if message.get("role") == "assistant" else 0.0
        text = message_text(message, [*islice(remaining, count_images(message.get("content")))])
        lines.append(f"{speaker(message)}: {_short(text)}{f' [{reward:+g}]' if reward else ''}")
    return "\n".join([*lines, f"({outcome.get('failure') or outcome['stop']})"])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT * 2 // 3]} … {line[-(SHORT // 3) :]}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
