"""Images, video and sound in rows: where prompts are text, a row that has some would be trained without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.errors import DataError, quoted

NAME = re.compile(r"(image|video|audio)s?([_-]?(url|path|file|data|bytes)s?)?|multi_?modal_(data|inputs)", re.I)
"""Names of columns and of fields of messages with what a prompt shows besides text."""
MARK = re.compile(
    r"<\|?(image|video|audio|vision)s?(_(\d+|pad|start|soft_token|token))?\|?>|<start_of_image>|<img_context>|\[img\]",
    re.I,
)
"""Text in the place of an image, video or sound."""
ENCODED = {"bytes", "path"}
"""Fields by which the library `datasets` stores a file."""
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\x00", b"MM\x00*", b"\x1aE\xdf\xa3", b"OggS", b"fLaC")
"""First bytes of files with images, video or sound."""
URL = re.compile(r"data:(image|video|audio)/")
REMEDY = "drop it where the text is complete without, or use rows of text"


def refuse_media(row: Mapping[str, Any], text_key: str, place: str) -> None:
    """Check that a row has nothing but text.

    Args:
        row: the data row.
        text_key: the column that is read as text.
        place: file and line, for messages.

    Raises:
        DataError: another column is filled with images, video or sound; the message names it.
    """
    for name, value in row.items():
        if name != text_key and is_media(name, value):
            raise DataError(
                f"{place}: column {quoted(name)} holds images, video or sound, and prompts are text alone; {REMEDY}"
            )


def is_media(name: object, value: Any) -> bool:
    """Return whether a column or field has images, video or sound, by its name or by its value."""
    named = isinstance(name, str) and NAME.fullmatch(name) is not None
    return _is_filled(value) if named else _is_file(value)


def _is_filled(value: Any) -> bool:
    """Return whether a value has content: null, NaN, 0, false, and what holds only these, has none."""
    if isinstance(value, str | bytes):
        return bool(value.strip())
    if isinstance(value, int | float):
        return value == value and value != 0
    if isinstance(value, Mapping):
        return any(map(_is_filled, value.values()))
    if isinstance(value, Sequence):
        return any(map(_is_filled, value))
    return value is not None and getattr(value, "size", 1) != 0  # an array


def _is_file(value: Any, depth: int = 2) -> bool:
    """Return whether a value is an image, a video or sound: an object, the bytes of a file, or a data URL."""
    if isinstance(value, str):
        return URL.match(value) is not None
    if isinstance(value, bytes):
        return value.startswith(SIGNATURES)
    if isinstance(value, Mapping):
        return value.keys() == ENCODED and _is_filled(value)
    if isinstance(value, Sequence):
        return depth > 0 and any(_is_file(each, depth - 1) for each in value)
    return type(value).__module__.partition(".")[0] == "PIL"


def without_decoding(dataset: Any) -> Any:
    """Return the rows of a `datasets.Dataset`, with files of images, video and sound as their bytes and paths.

    Decoding them needs further packages, and none is read.
    """
    return _EncodedRows(dataset) if any(map(_decodes, dataset.features.values())) else dataset.with_format(None)


def _decodes(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_decodes, feature.values()))
    if isinstance(feature, Sequence) and not isinstance(feature, str):
        return any(map(_decodes, feature))
    return hasattr(feature, "decode") or _decodes(getattr(feature, "feature", ()))


class _EncodedRows(Sequence[Mapping[str, Any]]):
    """The rows of a dataset as Arrow stores them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index : index + 1].to_pylist()[0]
