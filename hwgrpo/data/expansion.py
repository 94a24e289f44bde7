"""Compressed files that expand to far more than their size: refused before they fill the memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hwgrpo.errors import DataError

FACTOR = 100
"""How many times its size a compressed file may have in memory. Text compresses to a third or a tenth."""
SMALLEST = 1 << 28
"""Bytes that any file may have in memory: small files of equal rows compress much."""
ROWS_AT_ONCE = 256


def allowed_size(path: Path) -> int:
    """Return the bytes that a compressed file may have in memory."""
    return max(SMALLEST, FACTOR * path.stat().st_size)


def too_large(path: Path, remedy: str) -> DataError:
    """Return the error for a file that has more."""
    return DataError(
        f"{path}: {path.stat().st_size:,} bytes that expand to more than {allowed_size(path):,} "
        f"({FACTOR} times their size, but at least {SMALLEST:,}), as no file of text does; {remedy}"
    )


class BoundedExpansion(io.RawIOBase):
    """The expanded bytes of a file, up to what is allowed.

    Args:
        file: reads expanded bytes.
        path: the compressed file.
    """

    def __init__(self, file: io.BufferedIOBase, path: Path) -> None:
        self._file, self._path, self._left = file, path, allowed_size(path)

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end.

        Raises:
            DataError: the file has more than is allowed.
        """
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._path, "if it is one, unpack it with gunzip and name the .jsonl file")
        buffer[: len(data)] = data
        return len(data)


def check_parquet(file: Any, path: Path) -> None:
    """Check by its metadata and, where rows are less than a byte, by reading that a Parquet file is not too large.

    Args:
        file: a pyarrow.parquet.ParquetFile.
        path: the file.

    Raises:
        DataError: it is.
    """
    remedy = "if it is one, write it again with another compression, or in several files"
    metadata, allowed = file.metadata, allowed_size(path)
    groups = range(metadata.num_row_groups)
    if sum(metadata.row_group(group).total_byte_size for group in groups) > allowed:
        raise too_large(path, remedy)
    size = path.stat().st_size
    if metadata.num_rows > max(FACTOR * size, SMALLEST // ROWS_AT_ONCE):
        raise too_large(path, remedy)
    if metadata.num_rows <= size:
        return
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
        allowed -= batch.nbytes
        if allowed < 0:
            raise too_large(path, remedy)
