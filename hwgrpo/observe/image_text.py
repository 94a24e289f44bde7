"""Images in text: `[image 640x480]` in place of the tokens that stand for their parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwgrpo.values import PromptImages, Thumbnail

BETWEEN = r"(?:<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])?"
"""Another token that may stand between the rows of an image."""


def image_label(thumbnail: Thumbnail | None = None) -> str:
    """Return what stands for an image in text.

    Example:
        >>> from hwgrpo.values import Thumbnail
        >>> image_label(Thumbnail(b"", 640, 480))
        '[image 640x480]'
    """
    return "[image]" if thumbnail is None else f"[image {thumbnail.width}x{thumbnail.height}]"


def content_text(content: Any, thumbnails: Sequence[Thumbnail] = ()) -> str:
    """Return the content of a chat message as text, with a label where an image stands.

    Args:
        content: text, parts, or None.
        thumbnails: of its images, in order; without one a label has no size.
    """
    if content is None or isinstance(content, str):
        return content or ""
    remaining, texts = iter(thumbnails), []
    for part in content:
        label = image_label(next(remaining, None)) if _is_image(part) else part.get("text")
        texts += [label] if label else []
    return (" " if count_images(content) else "\n").join(texts)


def count_images(content: Any) -> int:
    """Return the number of images in a message's content."""
    return 0 if content is None or isinstance(content, str) else sum(map(_is_image, content))


def _is_image(part: Any) -> bool:
    return str(part.get("type", "")).startswith("image")


def with_labels(text: str, images: Sequence[PromptImages]) -> str:
    """Return a decoded text with a label in place of each run of tokens that stand for an image.

    Args:
        text: decoded tokens.
        images: those in the text, in order.
    """
    marks = {re.escape(each.mark) for each in images if each.mark}
    if not marks:
        return text
    remaining = iter([thumbnail for each in images for thumbnail in each.thumbnails])
    one = f"(?:{'|'.join(sorted(marks))})"
    return re.sub(f"{one}(?:{BETWEEN}{one})*", lambda _: image_label(next(remaining, None)), text)
