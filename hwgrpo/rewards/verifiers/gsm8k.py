"""The final number of a response to a question of GSM8K."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from hwgrpo.errors import DataError, choice_error, quoted
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.verifiers.numeric import numeric
from hwgrpo.rewards.verifiers.quantities import plain

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARKED_NUMBER = re.compile(rf"####\s*({NUMBER.pattern})")
METHODS = ("by_value", "lenient", "strict", "flexible")
VERL_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
VERL_FLEXIBLE = re.compile(r"(\-?[0-9\.\,]+)")
VERL_WINDOW = 300
"""Characters at the end of a response that verl searches."""


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "by_value", score: float = 1.0, format_score: float = 0.0
) -> float:
    """Compare the response's final number with the ground truth's.

    Args:
        solution_str: the response.
        ground_truth: the answer; of a list any. `by_value` and `lenient` also read a full solution, `... #### 18`.
        method: "by_value" compares the last number after `####` by value: `1,080.00` is `1080`. "lenient" compares the
            final number that the reward `numeric` reads, as in `#### **18**`. "strict" and "flexible" are verl's rules:
            in the last 300 characters the last number after `#### `, or the last number, equals the ground truth as
            text. `flexible` keeps the commas of the number, `strict` removes them.
        score: reward of the correct number.
        format_score: reward of a wrong number in the expected place.

    Returns:
        `score`, `format_score`, or 0 without a number.

    Raises:
        ConfigError: `method` is unknown.
        DataError: there is no ground truth, or `by_value` and `lenient` find no number in it.
    """
    if method not in METHODS:
        raise choice_error("kwargs.method of reward gsm8k", method, METHODS)
    answers = right_answers(ground_truth)
    if method == "lenient":
        return numeric(solution_str, [_truth(answer) for answer in answers], score=score, format_score=format_score)
    if method == "by_value":
        return _graded(
            final_number(solution_str, marked=True), [_truth(answer) for answer in answers], score, format_score
        )
    return _graded(_verl_number(solution_str, method), answers, score, format_score)


def _graded(number: Any, truths: Sequence[Any], score: float, format_score: float) -> float:
    if number is None:
        return 0.0
    return score if number in truths else format_score


def _verl_number(text: str, method: str) -> str | None:
    """Return the number that verl's `extract_solution` returns, as text."""
    text = text[-VERL_WINDOW:]
    if method == "strict":
        marked = VERL_STRICT.findall(text)
        return marked[-1].replace(",", "") if marked else None
    numbers = VERL_FLEXIBLE.findall(text)
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def _truth(text: str) -> Decimal:
    truth = final_number(plain(text), marked="####" in text)
    if truth is None:
        raise DataError(f"the ground truth {quoted(text)} contains no number")
    return truth


def final_number(text: str, marked: bool) -> Decimal | None:
    """Return the last number of a text (the last after `####` when `marked`), thousands separators and $ removed."""
    numbers = (MARKED_NUMBER if marked else NUMBER).findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
