"""`data.keep`: the rows of a file that meet a condition on one of their columns, each pair of texts once."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence

from hwgrpo.data.row_schema import missing_column
from hwgrpo.data.sources import Rows
from hwgrpo.errors import ConfigError, DataError, shown

CORRECT = "reward>0.5"
"""What `correct` means."""
OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(rf"\s*([\w.]+)\s*({'|'.join(OPERATORS)})\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)\s*")
LOGGED = frozenset(("uid", "prompt", "question", "response", "reward", "finished"))
"""Columns of completions.jsonl by which responses that a run logged are recognized."""


def are_logged(rows: Rows) -> bool:
    """Return whether rows are responses that a run has logged."""
    return set(rows.columns) >= LOGGED


def kept_rows(rows: Rows, keep: str | None, response_key: str) -> Sequence[int]:
    """Return the indices of the rows to train on.

    Of responses that a run has logged, those that reached the length limit or were dropped are left out: they do not
    show how a response ends. With a condition a response to the same prompt counts once.

    Args:
        rows: the data.
        keep: `data.keep`; None: no condition.
        response_key: `data.response_key`.

    Raises:
        ConfigError: `keep` is not a condition.
        DataError: no row has its column, or meets it.
    """
    chosen = range(len(rows))
    if are_logged(rows):
        chosen = [i for i in chosen if rows[i]["finished"] and rows[i]["response"] is not None]
    if keep is None:
        return chosen
    match = CONDITION.fullmatch(CORRECT if keep == "correct" else keep)
    if match is None:
        raise ConfigError(
            f"data.keep={shown(keep)} is neither correct nor a condition of a column, {', '.join(OPERATORS)} and a "
            "number: e.g. data.keep='reward>=0.8'"
        )
    column, sign, number = match[1], OPERATORS[match[2]], float(match[3])
    if column not in rows.columns:
        raise missing_column("data.keep", column, rows.columns, rows.parts[0].name)
    met: dict[tuple[str, ...], int] = {}
    for index in chosen:
        value = rows[index].get(column)
        if isinstance(value, int | float) and not math.isnan(value) and sign(value, number):
            met.setdefault(tuple(repr(rows[index].get(key)) for key in ("prompt", "messages", response_key)), index)
    if not met:
        unfinished = len(rows) - len(chosen)
        why = f"; {unfinished:,} reached the length limit or were dropped, and are never kept" if unfinished else ""
        raise DataError(
            f"data.keep={shown(keep)}: none of the {len(rows):,} rows of {rows.parts[0].name} meets it{why}"
        )
    return list(met.values())
