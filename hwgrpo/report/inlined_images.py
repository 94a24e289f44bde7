"""Thumbnails of a run as data URIs, so that the page stays one file."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from hwgrpo.observe.logged_images import FOLDER, NAME, PNG
from hwgrpo.observe.shown_fields import number
from hwgrpo.support.run_files import open_own

MOST_BYTES = 16 << 20
LARGEST = 1 << 20
"""Bytes of a file; thumbnails have less than a tenth."""
JPEG = b"\xff\xd8\xff"


class InlinedImages:
    """The distinct images of a page, each stored once; groups and completions have their indices.

    Args:
        run_dir: folder of the run.
        most_bytes: maximum size of all files; those that exceed it are shown by their size alone.
    """

    def __init__(self, run_dir: Path, most_bytes: int) -> None:
        self.values: list[tuple[str | None, int | None, int | None]] = []
        """Data URI, and width and height in pixels of the image itself."""
        self.too_many = 0
        """Images that exceed the limit."""
        self._folder, self._remaining = run_dir / FOLDER, most_bytes
        self._index: dict[tuple[Any, ...], int] = {}

    def indices(self, records: Any) -> list[int]:
        """Return the indices of the images of a record, `{file, width, height}` each; none where it has none."""
        return [self._add(record) for record in records] if isinstance(records, list) else []

    def _add(self, record: dict[str, Any]) -> int:
        key = str(record.get("file")), _pixels(record.get("width")), _pixels(record.get("height"))
        if key not in self._index:
            self._index[key] = len(self.values)
            self.values.append((self._source(key[0]), key[1], key[2]))
        return self._index[key]

    def _source(self, file: str) -> str | None:
        content = self._content(file)
        kind = "png" if content.startswith(PNG) else "jpeg" if content.startswith(JPEG) else None
        if kind is None:
            return None
        if len(content) > self._remaining:
            self.too_many += 1
            return None
        self._remaining -= len(content)
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

    def _content(self, file: str) -> bytes:
        """Return the content of a file in the folder, b"" where it cannot be shown.

        No other file is read, whatever a record says: a folder may be a stranger's.
        """
        folder, _, name = file.partition("/")
        if folder != FOLDER or not NAME.fullmatch(name) or self._folder.is_symlink():
            return b""
        try:
            with open(open_own(self._folder / name, os.O_RDONLY), "rb") as opened:
                content = opened.read(LARGEST + 1)
        except OSError:
            return b""
        return content if len(content) <= LARGEST else b""


def _pixels(value: Any) -> int | None:
    read = number(value)
    return int(read) if read is not None and 0 < read < 1e9 else None
