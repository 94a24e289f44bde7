"""The final number of a response to a question of GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from hwgrpo.errors import DataError, choice_error, quoted
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.verifiers.numeric import numeric
from hwgrpo.rewards.verifiers.quantities import plain

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARKED_NUMBER = re.compile(rf"####\s*({NUMBER.pattern})")
METHODS = ("strict", "flexible", "lenient")


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", score: float = 1.0, format_score: float = 0.0
) -> float:
    """Compare the response's final number with the ground truth's, as verl's rule for GSM8K does.

    Args:
        solution_str: the response.
        ground_truth: the answer, `18` or a full GSM8K solution that ends in `#### 18`; of a list any.
        method: "strict" uses the last number after `####`, "flexible" the last number in the response, both as verl
            finds them; "lenient" uses the final number that the reward `numeric` reads, as in `#### **18**`.
        score: reward of the correct number.
        format_score: reward of a wrong number in the expected place.

    Returns:
        `score`, `format_score`, or 0 without a number. Numbers are compared by value: `1,080.00` is `1080`.
    """
    if method not in METHODS:
        raise choice_error("kwargs.method of reward gsm8k", method, METHODS)
    truths = [_truth(answer) for answer in right_answers(ground_truth)]
    if method == "lenient":
        return numeric(solution_str, truths, score=score, format_score=format_score)
    answer = final_number(solution_str, marked=method == "strict")
    if answer is None:
        return 0.0
    return score if answer in truths else format_score


def _truth(text: str) -> Decimal:
    truth = final_number(plain(text), marked="####" in text)
    if truth is None:
        raise DataError(f"the ground truth {quoted(text)} contains no number")
    return truth


def final_number(text: str, marked: bool) -> Decimal | None:
    """Return the last number of a text (the last after `####` when `marked`), thousands separators and $ removed."""
    numbers = (MARKED_NUMBER if marked else NUMBER).findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
