"""One data row -> conversation or text, ground truth and source: verl's and TRL's columns, or others by config.

verl: `data_source`, `prompt` (chat messages), `ability`, `reward_model.ground_truth`, `extra_info`.
TRL: `prompt` (text or chat messages), every other column for the reward functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.data.formats import Row
from hwgrpo.data.media import REMEDY, is_media, refuse_media
from hwgrpo.errors import DataError, escaped, nearest, quoted

GROUND_TRUTH_KEYS = ("reward_model.ground_truth", "ground_truth", "answer", "solution", "target")
"""Columns tried in this order for the answer when no key is configured."""

Message = Mapping[str, Any]
_ABSENT = object()


def read_prompt(row: Row, key: str, place: str, *, images: bool = False) -> str | tuple[Message, ...]:
    """Return a row's prompt: a text, or the messages of a conversation.

    Args:
        row: the data row.
        key: its column (`data.prompt_key`).
        place: file and line, for messages.
        images: whether messages may have `{"type": "image"}` blocks; the caller has read other columns' images.

    Raises:
        DataError: the column is missing, empty, or neither text nor messages; or the row has images, video or sound.
    """
    if key not in row:
        raise missing_column("data.prompt_key", key, row, place)
    if not images:
        refuse_media(row, key, place)
    value = row[key]
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{place}: column {key!r} is empty; every row needs a prompt")
        check_text(value, f"{place}: column {key!r}")
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _messages(value, key, place, images)
    what = "empty (null)" if value is None else f"of type {type(value).__name__}"
    raise DataError(f"{place}: column {key!r} is {what}; a prompt is text or a list of chat messages")


def read_tools(row: Row, place: str) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON schemas in a row's column `tools`, a list or its JSON; none without the column.

    Raises:
        DataError: it holds something else.
    """
    value = row.get("tools")
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = value
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    ):
        raise DataError(
            f"{place}: column 'tools' is {quoted(value, 80)}; it must be a list of schemas, "
            '[{"type": "function", "function": {"name": ..., "parameters": ...}}]'
        )
    return tuple(tools)


def message_text(message: Message) -> str:
    """Return the text of a message that `read_prompt` has checked."""
    return "".join(message_parts(message))


def message_parts(message: Message) -> list[str]:
    """Return the texts of a message that `read_prompt` has checked, between which images may stand."""
    content = message.get("content")
    return [content] if isinstance(content, str) else [part["text"] for part in content or () if "text" in part]


def identity(prompt: str | Sequence[Message], images: Sequence[str] = ()) -> str:
    """Return a key for prompts that are equal up to white space; a text equals a single user message with it.

    Args:
        prompt: text or messages.
        images: digests of the images that it shows.
    """
    messages = (
        [("user", prompt)] if isinstance(prompt, str) else [(each["role"], message_text(each)) for each in prompt]
    )
    return json.dumps([*[(role, " ".join(content.split())) for role, content in messages], *images])


def check_text(text: str, where: str) -> None:
    """Check that a text can be written in UTF-8, which tokenizers need.

    Raises:
        DataError: it has half of a surrogate pair; the message starts with `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = quoted(text[max(0, error.start - 10) : error.start + 10])
        raise DataError(
            f"{where} has half of a surrogate pair, which is no character, at character {error.start}: {near}; "
            "fix the program that wrote the file, or leave out the row"
        ) from error


def read_ground_truth(row: Row, key: str | None, place: str) -> Any:
    """Return a row's answer; None when no key is configured and no usual column has one.

    Args:
        row: the data row.
        key: its column, with dots for nested ones; None tries GROUND_TRUTH_KEYS.
        place: file and line, for messages.

    Raises:
        DataError: `key` is given and the row lacks it.
    """
    if key is None:
        usual = ground_truth_key(row)
        return None if usual is None else _nested(row, usual)
    value = _nested(row, key)
    if value is _ABSENT:
        raise missing_column("data.ground_truth_key", key, row, place)
    return value


def ground_truth_key(row: Row) -> str | None:
    """Return the first of GROUND_TRUTH_KEYS under which a row has an answer, or None."""
    candidates = ((key, _nested(row, key)) for key in GROUND_TRUTH_KEYS)
    return next((key for key, value in candidates if value is not _ABSENT and value is not None), None)


def missing_column(setting: str, key: str, columns: Mapping[str, Any] | Sequence[str], place: str) -> DataError:
    """Return the error for a missing column, which lists the existing ones."""
    near = nearest(key, columns)
    hint = f" Did you mean {near!r}?" if near else ""
    names = escaped(", ".join(columns), 300) or "none"
    return DataError(f"{place}: no column {key!r} ({setting}); there are: {names}.{hint}")


def _nested(row: Row, key: str) -> Any:
    """Look up `a.b.c`; a column whose name contains the dots has precedence."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _messages(value: Sequence[Any], key: str, place: str, images: bool) -> tuple[Message, ...]:
    messages = []
    for number, message in enumerate(value):
        where = f"{place}: column {key!r}, message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f'{where} is not a chat message; expected {{"role": "user", "content": "..."}}')
        _check_content(message, where, images)
        shown = next((name for name, part in message.items() if name != "content" and is_media(name, part)), None)
        if shown is not None:
            raise DataError(f"{where} holds images, video or sound in {quoted(shown)}, and prompts are text; {REMEDY}")
        # A table gives every message the fields of all messages; templates treat a null field as present.
        messages.append({name: part for name, part in message.items() if part is not None or name == "content"})
    if not messages:
        raise DataError(f"{place}: column {key!r} is an empty conversation; every row needs a prompt")
    if all(not message.get("content") and not message.get("tool_calls") for message in messages):
        raise DataError(f"{place}: column {key!r} has only empty messages; every row needs a prompt")
    return tuple(messages)


def _check_content(message: Message, where: str, images: bool) -> None:
    content = message.get("content")
    if isinstance(content, str):
        if message["role"] == "user" and not content.strip():
            raise DataError(f"{where} is empty; every row needs a prompt")
        check_text(content, where)
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for part in content:
            if images and part == {"type": "image"}:
                continue
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where}: the content part {quoted(part)} is not supported; only "
                    f'{{"type": "text", "text": "..."}} is: {REMEDY}'
                )
            if any(name != "text" and is_media(name, value) for name, value in part.items()):
                raise DataError(f"{where}: a part of the content holds images, video or sound beside text; {REMEDY}")
            check_text(part["text"], where)
        if not content and not message.get("tool_calls"):
            raise DataError(f"{where} has no content parts")
    elif content is not None or not message.get("tool_calls"):
        raise DataError(f"{where}: 'content' is {type(content).__name__}; expected text")
