"""Thumbnails of images beside a log that refers to them, each distinct one once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.support.run_files import write_whole

if TYPE_CHECKING:
    from hwgrpo.values import Thumbnail

FOLDER = "images"
NAME = re.compile(r"[0-9a-f]{24}\.(?:png|jpg)")
"""Names of the files: a hash of the content."""
PNG = b"\x89PNG\r\n\x1a\n"


class LoggedImages:
    """Writes thumbnails to a folder, up to a number of files.

    Args:
        folder: the folder, made with the first file.
        most: maximum number of files, those that are there included; 0 writes none.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._names = self._found()

    def records(self, thumbnails: Sequence[Thumbnail]) -> list[dict[str, Any]]:
        """Write the thumbnails that are new, and return what a record has of each.

        Returns:
            `{file, width, height}` of each: the path of the thumbnail from the folder of the log, None where the limit
            is reached, and the size of the image in pixels.

        Raises:
            OSError: a file cannot be written.
        """
        return [{**image_record(each), "file": self._written(each.content)} for each in thumbnails]

    def remove_others(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Remove the files that no record of the log refers to."""
        named = {each.get("file") for record in records for key in KEYS for each in record.get(key) or ()}
        for name in self._found():
            if f"{self._folder.name}/{name}" not in named:
                (self._folder / name).unlink(missing_ok=True)
        self._names = self._found()

    def _written(self, content: bytes) -> str | None:
        suffix = "png" if content.startswith(PNG) else "jpg"
        name = f"{hashlib.sha256(content).hexdigest()[:24]}.{suffix}"
        if name not in self._names:
            if len(self._names) >= self._most:
                return None
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / name, content)
            self._names.add(name)
        return f"{self._folder.name}/{name}"

    def _found(self) -> set[str]:
        if not self._folder.is_dir():
            return set()
        return {path.name for path in self._folder.iterdir() if NAME.fullmatch(path.name)}


KEYS = ("images", "observed_images")
"""Fields of a record with images: those of its prompt, and those of its response."""


def image_record(thumbnail: Thumbnail) -> dict[str, Any]:
    """Return what a record has of an image whose thumbnail is not written."""
    return {"file": None, "width": thumbnail.width, "height": thumbnail.height}
