"""Blocks of text and images that a tool returns, as JSON has them: they may come from another process."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.data.image_rows import OTHER_BLOCKS
from hwgrpo.data.images import ACCEPTED, PAYLOADS, is_empty, is_picture, payload_of, png_of
from hwgrpo.data.observed_images import check_parts
from hwgrpo.errors import DataError

Block = dict[str, Any]
RESULT = "the tool's result"
"""In messages, which the model reads as the answer to its call."""


def has_blocks(value: Any) -> bool:
    """Return whether a value is an image, a list with an image or a block of one, or a list of blocks of text.

    Any other list is what JSON has. A block of video or sound is one, too, which `read_blocks` refuses.
    """
    if not isinstance(value, list | tuple):
        return is_picture(value)
    if any(map(_is_shown, value)):
        return True
    texts = [isinstance(each, Mapping) and each.keys() == {"type", "text"} and each["type"] == "text" for each in value]
    return len(texts) > 0 and all(texts)


def read_blocks(value: Any) -> list[Block]:
    """Return an image, or images, blocks and strings, as blocks; images are PNG files in base64, paths and URLs stay.

    Raises:
        DataError: one is neither text nor an image, or an image cannot be read.
    """
    listed = list(value) if isinstance(value, list | tuple) else [value]
    blocks = [
        text_block(each) if isinstance(each, str) else {"type": "image", "image": each} if is_picture(each) else each
        for each in listed
    ]
    check_parts(blocks, RESULT)
    return [
        text_block(block["text"]) if block["type"] == "text" else _image_block(block, f"{RESULT}, block {number}")
        for number, block in enumerate(blocks)
    ]


def text_block(text: str) -> Block:
    """Return a text as a block."""
    return {"type": "text", "text": text}


def as_blocks(content: str | Sequence[Block]) -> list[Block]:
    """Return the content of a message as blocks."""
    return [text_block(content)] if isinstance(content, str) else [*content]


def as_content(blocks: Sequence[Block]) -> str | list[Block]:
    """Return blocks as the content of a message: as text where they have no image."""
    merged = merge_texts(blocks)
    if all(block["type"] == "text" for block in merged):
        return "".join(block["text"] for block in merged)
    return merged


def merge_texts(blocks: Sequence[Block]) -> list[Block]:
    """Return blocks with neighbouring texts as one, without empty ones: two could be a special token together."""
    merged: list[Block] = []
    for is_text, same in itertools.groupby(blocks, lambda block: block["type"] == "text"):
        run = [*same]
        merged += [text_block("".join(block["text"] for block in run))] if is_text else run
    return [block for block in merged if block.get("text") != ""]


def shorten_texts(blocks: Sequence[Block], max_chars: int, side: str) -> list[Block]:
    """Return blocks whose texts are shortened as one text, with a marker of how many characters were left out.

    Args:
        blocks: merged (`merge_texts`).
        max_chars: longest text of all blocks together, without the marker.
        side: that is left out of a longer one: left, middle, right.
    """
    total = sum(len(block["text"]) for block in blocks if block["type"] == "text")
    if total <= max_chars:
        return [*blocks]
    start = {"left": 0, "middle": (max_chars + 1) // 2, "right": max_chars}[side]
    stop, place = total - max_chars + start, 0
    shorter: list[Block] = []
    for block in blocks:
        if block["type"] == "text":
            text, first, rest = block["text"], start - place, stop - place
            marker = f"...[{stop - start} characters left out]..." if 0 <= first < len(text) else ""
            block = text_block(text[: max(0, first)] + marker + text[max(0, rest) :])
            place += len(text)
        shorter.append(block)
    return merge_texts(shorter)


def _is_shown(value: Any) -> bool:
    """Return whether a value is an image, or a block of an image, video or sound and nothing else."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        return is_picture(value)
    is_other = OTHER_BLOCKS.fullmatch(kind) is not None
    if kind not in ("image", "image_url") and not is_other:
        return False
    filled = [str(name) for name, each in value.items() if name != "type" and not is_empty(each)]
    known = [name in PAYLOADS or (is_other and OTHER_BLOCKS.fullmatch(name) is not None) for name in filled]
    return len(known) > 0 and all(known)


def _image_block(block: Mapping[str, Any], where: str) -> Block:
    """Return a block with an image, one that stands in a dict of the block (`{bytes, path}`) included."""
    payload = payload_of(block, where)
    if payload is None:
        raise DataError(f"{where} has no image")
    name, value = payload
    if name == "image" and isinstance(value, Mapping):
        return _image_block(value, where)
    if is_picture(value):
        value = png_of(value, where)
    if isinstance(value, bytes | bytearray | memoryview) and name != "base64":
        return {"type": "image", "base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str | Mapping):
        raise DataError(f"{where} has an image of type {type(value).__name__}; {ACCEPTED}")
    return {"type": "image", name: value}
