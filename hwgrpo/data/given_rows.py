"""Rows in memory, given to `hwgrpo.Trainer` as an object: a dataset, or a sequence of mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.data.formats import Part
from hwgrpo.data.media import without_decoding
from hwgrpo.errors import DataError, shown
from hwgrpo.support.given_objects import find_object, name_of

ACCEPTED = "give a datasets.Dataset, a list of dicts, or another sequence of mappings"


def rows_of_object(spec: str, key: str) -> Part:
    """Return the rows of an object that a setting names.

    Args:
        spec: `object://NAME`.
        key: the setting, for messages ("data.train").

    Raises:
        ConfigError: no such object was given.
        DataError: it is not a sequence of mappings, or has no rows.
    """
    return part_of(find_object(spec, key), spec, key)


def part_of(rows: Any, name: str, key: str) -> Part:
    """Return rows in memory as a part.

    Args:
        rows: a `datasets.Dataset`, or a sequence of mappings.
        name: their name in messages and metrics.
        key: the setting, for messages ("data.train").

    Raises:
        DataError: as `rows_of_object`.
    """
    check_rows(rows, key)
    if hasattr(rows, "column_names"):  # a datasets.Dataset, which reads a row on access
        return Part(name, without_decoding(rows), tuple(rows.column_names), name_of(name))
    read = [rows[index] for index in range(len(rows))]
    for number, row in enumerate(read):
        if not isinstance(row, Mapping):
            raise DataError(
                f'{name}, row {number}: a row must be a mapping such as {{"prompt": ...}}, this is {shown(row)}'
            )
    columns = dict.fromkeys(column for row in read for column in row)
    return Part(name, read, tuple(columns), name_of(name))


def check_rows(rows: Any, key: str) -> None:
    """Check that an object is a sequence with rows.

    Raises:
        DataError: it is not, with what to give instead.
    """
    kind = f"{key}: a {type(rows).__module__.partition('.')[0]} {type(rows).__name__}"
    if isinstance(rows, Mapping):  # a datasets.DatasetDict is one, too
        raise DataError(f"{kind} has splits or columns ({', '.join(map(str, rows))[:80]}), not rows; give one split")
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        raise DataError(f"{kind} has columns; give its rows: to_dict('records')")
    if isinstance(rows, str | bytes) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(f"{kind} is no sequence of rows, whose number a run must know; {ACCEPTED}")
    if not len(rows):
        raise DataError(f"{kind} has no rows")
