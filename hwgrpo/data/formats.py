"""One data file -> its rows. Errors name the file and the line or row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.expansion import BoundedExpansion, check_parquet
from hwgrpo.errors import DataError, error_text, quoted

Row = Mapping[str, Any]
Broken = dict[int, DataError]
"""Row index -> error, for the broken rows of a file."""


@dataclass(frozen=True)
class Part:
    """The rows of one file (or task, or hub dataset)."""

    name: str
    """Name in messages: the path as the user wrote it."""
    rows: Sequence[Row]
    columns: tuple[str, ...]
    """Union of the columns of all rows."""
    source: str
    """Default source of prompts without a source column."""
    lines: Sequence[int] | None = None
    """Line number of each row, from 1, where the format has lines."""

    def place(self, row: int) -> str:
        """Return the place of a row: `train.jsonl, line 7`, `train.parquet, row 6` (from 0, as in the libraries)."""
        return f"{self.name}, line {self.lines[row]}" if self.lines else f"{self.name}, row {row}"


def read_file(path: Path, broken: Broken | None = None) -> Part:
    """Read a data file, whose suffix is one of `READERS`.

    Args:
        path: the file.
        broken: collects the errors of single rows by index, which are then not raised; such a row is `{}`.

    Raises:
        DataError: the file is broken, cannot be read or has no rows, or a row is not an object.
    """
    try:
        part = READERS[path.suffix.lower()](path, broken)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error_text(error, 200)}); check its permissions, or copy it"
        ) from error
    if not len(part.rows):
        raise DataError(f"{path}: the file has no rows")
    return part


def each_row(part: Part, broken: Broken) -> Iterator[tuple[int, Row | DataError]]:
    """Yield (index, row or its error) for every row of `read_file(path, broken)`."""
    for index in range(len(part.rows)):
        try:
            yield index, broken[index] if index in broken else part.rows[index]
        except DataError as error:  # in Parquet invalid UTF-8 is detected only on access
            yield index, error


def read_jsonl(path: Path, broken: Broken | None = None) -> Part:
    """Read JSON lines, one object a line; blank lines are skipped."""
    with path.open("rb") as file:
        return _read_lines(file, path, broken)


def read_gzip(path: Path, broken: Broken | None = None) -> Part:
    """Read compressed JSON lines, .jsonl.gz."""
    if not path.name.lower().endswith(".jsonl.gz"):
        raise DataError(f"{path}: of compressed files only .jsonl.gz can be read; unpack it with gunzip")
    try:
        with gzip.open(path) as file:
            return _read_lines(io.BufferedReader(BoundedExpansion(file, path), 1 << 16), path, broken)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: truncated, damaged or not a gzip file ({error_text(error, 200)})") from error


def _read_lines(file: Iterable[bytes], path: Path, broken: Broken | None) -> Part:
    rows, lines = [], []
    for number, raw in enumerate(file, start=1):
        try:
            row = _json_line(raw, "utf-8-sig" if number == 1 else "utf-8", f"{path}, line {number}")
        except DataError as error:
            row = _collect_error(error, broken, len(rows))
        if row is not None:
            rows.append(row)
            lines.append(number)
    return Part(str(path), rows, _columns(rows), path.name, lines)


def read_json(path: Path, broken: Broken | None = None) -> Part:
    """Read a JSON file: a list of objects, or {"data": [...]}."""
    raw = path.read_bytes()
    if not raw.strip():
        raise DataError(f"{path}: the file is empty")
    text = _decoded(raw, str(path))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        extra = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        hint = "; if it has one object per line, name it .jsonl" if extra else ""
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}{line}: {_not_json(error)}{hint}") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f'{path}: must contain a list of objects, or {{"data": [...]}}; it contains {_kind(content)}')
    for number, row in enumerate(rows):
        try:
            _object(row, f"{path}, row {number}")
        except DataError as error:
            rows[number] = _collect_error(error, broken, number)
    return Part(str(path), rows, _columns(rows), path.name)


def read_parquet(path: Path, broken: Broken | None = None) -> Part:
    """Read a Parquet file; errors of a row are raised on access, so `broken` is unused."""
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty")
    try:
        file = pyarrow.parquet.ParquetFile(path)
        check_parquet(file, path)
        table = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: truncated, damaged or not a Parquet file ({error_text(error, 200)}); copy or write it again"
        ) from error
    twice = first_repeated(table.column_names)
    if twice is not None:
        raise DataError(f"{path}: two columns have the name {quoted(twice)}; rename one")
    return Part(str(path), ArrowRows(table.combine_chunks(), str(path)), tuple(table.column_names), path.name)


def read_csv(path: Path, broken: Broken | None = None) -> Part:
    """Read a .csv file (a .tsv one: by tabs) with the columns' names in its first line; every value is text."""
    text = _decoded(path.read_bytes(), str(path))
    records = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    rows, lines, columns = [], [], None
    start, largest = 1, csv.field_size_limit(max(len(text), 1))
    try:
        for record in records:
            place, line, start = f"{path}, line {start}", start, records.line_num + 1
            if not record:
                continue
            if columns is None:
                columns = _header(record, place)
                continue
            row: dict[str, Any] = dict(zip(columns, record, strict=False))
            if len(record) != len(columns):
                error = DataError(f"{place}: {len(record)} values for {len(columns)} columns; quote those with commas")
                row = _collect_error(error, broken, len(rows))
            rows.append(row)
            lines.append(line)
    except csv.Error as error:
        raise DataError(f"{path}, line {records.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(largest)
    return Part(str(path), rows, tuple(columns or ()), path.name, lines)


def _header(names: Sequence[str], place: str) -> Sequence[str]:
    twice = first_repeated(names)
    if twice is not None:
        raise DataError(f"{place}: two columns have the name {quoted(twice)}; rename one")
    return names


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that is there more than once, if one is."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


TABLES = (".csv", ".tsv")
"""Formats that folders often contain for other purposes."""
READERS: Mapping[str, Callable[[Path, Broken | None], Part]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".gz": read_gzip,
}


class ArrowRows(Sequence[Row]):
    """The rows of an Arrow table, converted to Python objects on access.

    Args:
        table: a pyarrow.Table.
        name: the file, for messages.
    """

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{self._name}, row {index}", error) from error
        except (ValueError, OverflowError) as error:  # a date beyond Python's range
            raise DataError(
                f"{self._name}, row {index}: a value cannot be read ({error_text(error, 200)}); write it as text"
            ) from error


def _json_line(raw: bytes, encoding: str, place: str) -> dict[str, Any] | None:
    """Return the object of a line, or None for a blank one."""
    try:
        text = raw.decode(encoding).strip()
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from error
    if not text:
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: {_not_json(error)}; each line must be one complete JSON object") from error
    return _object(row, place)


def _collect_error(error: DataError, broken: Broken | None, index: int) -> dict[str, Any]:
    """Collect the error of a row and return an empty row, or raise it without `broken`."""
    if broken is None:
        raise error
    broken[index] = error
    return {}


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f'{place}: a row must be a JSON object such as {{"prompt": ...}}, this is {_kind(row)}')
    return row


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(column for row in rows for column in row))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _decoded(raw: bytes, name: str) -> str:
    """Return the text of a file, without a byte order mark.

    Raises:
        DataError: it is not UTF-8; the message names the line.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _not_utf8(f"{name}, line {line}", error) from error


def _not_json(error: Exception) -> str:
    """Describe a JSON error: besides syntax, nesting and integers have a limit."""
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply to be read"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg}, column {error.colno})"
    return f"JSON with an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"


def _not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(f"{place}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8, e.g. with iconv -t UTF-8")
