"""A row with images -> a conversation with a block where each image stands, and the images in that order."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hwgrpo.data.formats import Row
from hwgrpo.data.images import images_in, payload_of
from hwgrpo.data.media import is_media
from hwgrpo.data.row_schema import Message, message_parts, missing_column, read_prompt
from hwgrpo.errors import DataError, quoted

COLUMNS = ("images", "image")
"""Columns that are tried, verl's and TRL's, where `data.images.key` is null."""
BLOCK: Mapping[str, Any] = {"type": "image"}
"""Stands in a message where an image is shown."""
PLACE = "<image>"
"""The same in text, as verl writes it."""
OTHERS = re.compile(r"<(?:video|audio)>")
OTHER_BLOCKS = re.compile(r"(input_)?(video|audio)(_url)?", re.I)
OTHER_COLUMNS = re.compile(r"(video|audio)s?([_-]?(url|path|file|data|bytes)s?)?|multi_?modal_(data|inputs)", re.I)


class ImagePrompt(NamedTuple):
    """The prompt of a row that may have images."""

    prompt: str | tuple[Message, ...]
    """Text where it has none and the column is text; else messages, with `BLOCK` where an image stands."""
    sources: tuple[Any, ...] = ()
    """What the row has for each image, in the order of the messages."""


class _Place(NamedTuple):
    own: Any
    """The image that the block has itself; None where it is the column's next."""


def read_image_prompt(row: Row, config: Any, marks: Collection[str], place: str) -> ImagePrompt:
    """Return the prompt of a row, with its images.

    Args:
        row: the data row.
        config: the `data` settings.
        marks: texts by which the model's tokens show an image, which no message may have.
        place: file and row, for messages.

    Raises:
        DataError: the prompt is malformed, or images and their places do not match.
    """
    key = config.prompt_key
    if key not in row:
        raise missing_column("data.prompt_key", key, row, place)
    column, given = column_images(row, config, place)
    value = row[key]
    plain = isinstance(value, str)
    messages = [{"role": "user", "content": value}] if plain else value
    places: list[_Place] = []
    if isinstance(messages, Sequence) and not isinstance(messages, bytes):
        messages = [
            _with_blocks(each, places, f"{place}: column {key!r}, message {n}") for n, each in enumerate(messages)
        ]
    if given and not places:
        messages = _before_first_question(messages, len(given), place)
        places = [_Place(None)] * len(given)
    sources = _filled(places, given, column, place)
    if len(sources) > config.images.max_per_prompt:
        raise DataError(
            f"{place}: the prompt has {len(sources)} images, more than data.images.max_per_prompt="
            f"{config.images.max_per_prompt}; raise it, or leave out the row"
        )
    prompt = read_prompt({**row, key: value if plain and not sources else messages}, key, place, images=True)
    _refuse_marks(prompt, marks, place)
    return ImagePrompt(prompt, tuple(sources))


def column_images(row: Row, config: Any, place: str) -> tuple[str, list[Any]]:
    """Return the name of the column with a row's images, and the images.

    Raises:
        DataError: two columns have images, or one has video or sound.
    """
    key = config.images.key
    for name, value in row.items():
        if name == config.prompt_key or not is_media(name, value):
            continue
        if OTHER_COLUMNS.fullmatch(name):
            raise DataError(
                f"{place}: column {quoted(name)} holds video, sound or inputs of other processors, and prompts are "
                "text and images; drop it where the row is complete without, or leave out the row"
            )
        if key is None and name not in COLUMNS:
            raise DataError(
                f"{place}: column {quoted(name)} holds images, and {' and '.join(COLUMNS)} are the columns that are "
                f"read; set data.images.key={name}, or drop it"
            )
    if key is not None:
        return key, images_in(row.get(key))
    filled = [name for name in COLUMNS if images_in(row.get(name))]
    if len(filled) > 1:
        raise DataError(f"{place}: columns {' and '.join(filled)} both have images; name one with data.images.key")
    name = filled[0] if filled else COLUMNS[0]
    return name, images_in(row.get(name))


def _with_blocks(message: Any, places: list[_Place], where: str) -> Any:
    """Return a message with `BLOCK` where an image stands, and add those places to the list."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        parts = list(_split(content, places, where))
        return {**message, "content": parts} if BLOCK in parts else message
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            split = list(_split(part["text"], places, where))
            parts += split if BLOCK in split else [part]
        elif kind in ("image", "image_url"):
            payload = payload_of(part, f"{where}, block {number}")
            places.append(_Place(None if payload is None else {payload[0]: payload[1]}))
            parts.append(BLOCK)
        elif isinstance(kind, str) and OTHER_BLOCKS.fullmatch(kind):
            raise DataError(
                f"{where}, block {number} is of type {kind!r}, and prompts are text and images; leave out the row"
            )
        else:
            parts.append(part)
    return {**message, "content": parts}


def _split(text: str, places: list[_Place], where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a text, with a block for each `PLACE`."""
    other = OTHERS.search(text)
    if other is not None:
        raise DataError(
            f"{where} has {other[0]}, the place of video or sound, and prompts are text and images; leave out the row"
        )
    for number, part in enumerate(text.split(PLACE)):
        if number:
            places.append(_Place(None))
            yield BLOCK
        if part:
            yield {"type": "text", "text": part}


def _before_first_question(messages: Any, count: int, place: str) -> list[Any]:
    """Return messages with the places of all images before the text of the first user message, as TRL has them."""
    changed = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, bytes) else []
    first = next(
        (n for n, each in enumerate(changed) if isinstance(each, Mapping) and each.get("role") == "user"), None
    )
    if first is None:
        raise DataError(
            f"{place}: the row has {count} images, and no message of the user that could show them; write {PLACE} "
            "where they stand"
        )
    content = changed[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    changed[first] = {**changed[first], "content": [*[BLOCK] * count, *texts]}
    return changed


def _filled(places: Sequence[_Place], given: Sequence[Any], column: str, place: str) -> list[Any]:
    """Return the image of each place: its own, or the next of the column."""
    empty = sum(each.own is None for each in places)
    if empty != len(given):
        own = len(places) - empty
        besides = f", besides {own} blocks with an image of their own" if own else ""
        raise DataError(
            f"{place}: the prompt has {empty} places for images ({PLACE}, or blocks without an image){besides}, and "
            f"column {column!r} has {len(given)} images; write one place per image, or none at all to show them before "
            "the text"
        )
    rest = iter(given)
    return [next(rest) if each.own is None else each.own for each in places]


def _refuse_marks(prompt: str | Sequence[Message], marks: Collection[str], place: str) -> None:
    texts = [prompt] if isinstance(prompt, str) else [text for each in prompt for text in message_parts(each)]
    found = next((mark for mark in sorted(marks) for text in texts if mark in text), None)
    if found is not None:
        raise DataError(
            f"{place}: the text has {quoted(found)}, which would become the model's token of an image; write {PLACE} "
            "where an image stands, and take it out elsewhere"
        )
