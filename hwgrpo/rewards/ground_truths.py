"""The right answers of a row as texts: one reading of a ground truth for rewards, judges and checks of data."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from hwgrpo.errors import DataError, quoted
from hwgrpo.support.jsonlines import jsonable

LISTS = (list, tuple, set, frozenset)
TARGET = ("target",)
"""The field of verl's question answering data: `{"target": ["New York", "NYC"]}`."""
NONE = "the row has no ground truth; name its column with data.ground_truth_key"


def right_answers(ground_truth: Any, fields: Collection[str] = ()) -> list[str]:
    """Return the right answers of a row as texts; a response needs one of them.

    Example:
        "18" -> ["18"], 18.0 -> ["18"], 1e-05 -> ["0.00001"], True -> ["true"], ["18", 19.0] -> ["18", "19"]

    Args:
        ground_truth: text, a number, a boolean, a date, or a list of these.
        fields: the fields of a mapping that the caller documents; the first one there is read.

    Raises:
        DataError: there is none, or it is a mapping without such a field, a list in a list, or of another type.
    """
    if isinstance(ground_truth, Mapping):
        field = next((name for name in fields if name in ground_truth), None)
        if field is None:
            read = f"; read is its field {' or '.join(map(repr, fields))}" if fields else ", which is not read here"
            raise DataError(
                f"the ground truth {quoted(ground_truth)} is a mapping{read}; name the field with the answer with "
                "data.ground_truth_key, as in data.ground_truth_key=reward_model.ground_truth.value"
            )
        ground_truth = ground_truth[field]
    ground_truth = _plain(ground_truth)
    if not isinstance(ground_truth, LISTS):
        return [answer_text(ground_truth)]
    if not ground_truth:
        raise DataError(f"the ground truth {quoted(ground_truth)} lists no right answer")
    return [answer_text(answer) for answer in ground_truth]


def answer_text(answer: Any) -> str:
    """Return one right answer as text: numbers without exponent or `.0`, booleans as JSON has them.

    Raises:
        DataError: it is missing, not finite, or neither text, number, boolean nor date.
    """
    answer = _plain(answer)
    if isinstance(answer, str):
        return answer
    if is_missing(answer):
        raise DataError(NONE if answer is None else f"the ground truth is {answer}, which is no answer: {NONE}")
    if isinstance(answer, bool):
        return "true" if answer else "false"
    if isinstance(answer, int | datetime.date | datetime.time):
        return str(answer)
    if isinstance(answer, float | decimal.Decimal):
        return _digits(answer)
    raise DataError(
        f"the ground truth {quoted(answer)} is of type {type(answer).__name__}; allowed: text, a number, a boolean, a "
        "date, or a list of these, each a right answer"
    )


def is_missing(ground_truth: Any) -> bool:
    """Return whether a value is no ground truth: null, NaN (a gap in a column of numbers) or an empty list."""
    value = _plain(ground_truth)
    if isinstance(value, float | decimal.Decimal):
        return math.isnan(value)
    return value is None or (isinstance(value, LISTS) and not value)


def own_answer(ground_truth: Any) -> str | None:
    """Return a response that is a row's own first right answer, JSON of what has another form; None without one."""
    if is_missing(ground_truth):
        return None
    try:
        return right_answers(ground_truth, TARGET)[0]
    except DataError:
        return json.dumps(jsonable(ground_truth), ensure_ascii=False)


def shown_answers(ground_truth: Any) -> str:
    """Return a ground truth as text for a judge: one answer as it is, several, mappings and lists of them as JSON.

    Raises:
        DataError: as `right_answers` does.
    """
    value = _plain(ground_truth)
    if isinstance(value, Mapping) or (
        isinstance(value, LISTS) and any(isinstance(each, (Mapping, *LISTS)) for each in map(_plain, value))
    ):
        return json.dumps(jsonable(ground_truth), ensure_ascii=False)
    answers = right_answers(ground_truth)
    return answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return an array or its scalar as Python's objects; a number keeps the digits of its own precision."""
    if hasattr(value, "tolist") and not isinstance(value, float):
        plain = value.tolist()
        return float(str(value)) if isinstance(plain, float) else plain
    return value


def _digits(number: float | decimal.Decimal) -> str:
    if not math.isfinite(number):
        raise DataError(f"the ground truth {number} is not finite: mend the row or leave it out")
    digits = format(decimal.Decimal(str(number)), "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits
