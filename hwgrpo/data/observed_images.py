"""Messages with images that a policy observes -> messages of the chat template, and the tokens of their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.data.image_rows import BLOCK, OTHER_BLOCKS
from hwgrpo.data.images import ImageReader, payload_of
from hwgrpo.errors import DataError, quoted

if TYPE_CHECKING:  # processes of tools import this module, and do without torch
    from hwgrpo.data.image_prompts import ImagePrompts
    from hwgrpo.values import PromptImages

Message = Mapping[str, Any]


def shows_images(messages: Sequence[Message]) -> bool:
    """Return whether a message has a block with an image."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def without_images(message: Message) -> dict[str, Any]:
    """Return a message with bare blocks in place of its images, as records have it."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    return {**message, "content": [dict(BLOCK) if _is_image(part) else part for part in content]}


def check_parts(content: Sequence[Any], where: str) -> None:
    """Check that the content of a message is blocks of text and images.

    Raises:
        DataError: a block is something else; the message begins with `where`.
    """
    for number, part in enumerate(content):
        of_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if of_text:
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and OTHER_BLOCKS.fullmatch(kind):
            raise DataError(f"{where}, block {number} is of type {kind!r}, and a message has text and images")
        if not _is_image(part):
            raise DataError(
                f'{where}, block {number} is {quoted(part, 80)}; expected {{"type": "text", "text": ...}} or '
                '{"type": "image", "image": ...}'
            )
        if payload_of(part, f"{where}, block {number}") is None:
            raise DataError(f"{where}, block {number} has no image")


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


class ObservedImages:
    """Reads the images that tools and environments show.

    Args:
        prompts: makes the tokens of text and images.
        settings: `data.images`, whose limits hold for them, too.
    """

    def __init__(self, prompts: ImagePrompts, settings: Any) -> None:
        self._prompts, self._most, self._reader = prompts, settings.max_per_prompt, ImageReader(settings)

    def read(self, messages: Sequence[Message], where: str) -> list[Any]:
        """Return the images of messages in RGB, in their order.

        Args:
            messages: checked by `check_parts`.
            where: for messages of errors.

        Raises:
            DataError: an image is broken, too large or not allowed, or there are too many.
        """
        sources = [dict([found]) for message in messages for part in _parts(message) if (found := _image(part, where))]
        if len(sources) > self._most:
            raise DataError(f"{where}: {len(sources)} images, more than data.images.max_per_prompt={self._most}")
        return [each.image for each in self._reader.read_all(sources, Path(), where)]

    def encode(self, text: str, images: Sequence[Any], where: str) -> tuple[list[int], PromptImages]:
        """Return the tokens of a text that marks as many images; see `ImagePrompts.encode`.

        Raises:
            DataError: it marks others, as an observation with the text of such a mark does.
        """
        self.check_marks(text, len(images), where)
        return self._prompts.encode(text, images, where)

    def check_marks(self, text: str, images: int, where: str) -> None:
        """Check that a text after the chat template marks as many images; see `ImagePrompts.check_marks`."""
        self._prompts.check_marks(text, images, where)


def _image(part: Any, where: str) -> tuple[str, Any] | None:
    return payload_of(part, where) if _is_image(part) else None
