"""The final number of a response, with tolerance, percent, fractions, scientific notation and units."""

from __future__ import annotations

import math
import re
from typing import Any

from hwgrpo.errors import ConfigError, DataError, quoted
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.verifiers.quantities import Quantity, has_unit, plain, prefix_ratio, quantities, unit_of
from hwgrpo.rewards.verifiers.stated_answer import after_thinking, boxed, tagged

STATEMENT = re.compile(r"answer(?: is|:| =)", re.IGNORECASE)
EQUAL = re.compile("[=≈]")
LONE_SIGN = re.compile(r"^( ?[-+]) (?=[0-9.])")
CONTINUATION = re.compile("[-–—:][0-9.]")


def numeric(
    solution_str: str,
    ground_truth: Any,
    rel_tol: float = 1e-9,
    abs_tol: float = 0.0,
    prefixes: bool = False,
    score: float = 1.0,
    format_score: float = 0.0,
) -> float:
    r"""Compare the response's final number with the ground truth's, as `math.isclose` does.

    The final number is that of the last `\boxed{}`, else of the last `<answer>`, else after the last `####`, else after
    the last "answer is" or "answer:", else the last of all. Read are `1,234.5`, `1/2`, `\frac{1}{2}`, `1.5e3`,
    `1.5 \times 10^3`, `2^{10}`, `50%`, `$18`, `**18**`; a list of numbers (`1,2` and several in the box) is none,
    and so is a range (`3-5`), a time or a ratio where the answer is stated. A percent sign divides by 100; where the
    ground truth has none, the number as written is right, too. Text before `</think>` is ignored.

    Args:
        solution_str: the response.
        ground_truth: a number, or a text with one and perhaps a unit after it: `18`, `#### 18`, `9.81 m/s^2`; of a list
            any. Where it has a unit, the response needs the same one; where it has none, that of the response is
            ignored.
        rel_tol: largest difference, relative to the larger number.
        abs_tol: largest difference, if `rel_tol` allows less.
        prefixes: whether `1.5 km` is `1500 m`: SI prefixes of the same simple unit are converted.
        score: reward of the right number.
        format_score: reward of another number.

    Returns:
        `score`, `format_score`, or 0 without a number.

    Raises:
        DataError: the ground truth has no number.
        ConfigError: a tolerance is negative.
    """
    if not (rel_tol >= 0 and abs_tol >= 0):
        raise ConfigError(f"kwargs.rel_tol={rel_tol}, abs_tol={abs_tol} of reward numeric; allowed: 0 and more")
    truths = [_truth(answer) for answer in right_answers(ground_truth)]
    answer = final_quantity(solution_str)
    if answer is None:
        return 0.0
    right = any(_is_right(answer, truth, unit, rel_tol, abs_tol, prefixes) for truth, unit in truths)
    return score if right else format_score


def _is_right(answer: Quantity, truth: Quantity, unit: str, rel_tol: float, abs_tol: float, prefixes: bool) -> bool:
    values = {answer.value / 100 if answer.percent else answer.value}
    if answer.percent and not truth.percent:
        values.add(answer.value)
    if unit and not has_unit(answer.rest, unit):
        ratio = prefix_ratio(answer.rest, unit) if prefixes else None
        values = {value * ratio for value in values} if ratio is not None else set()
    expected = truth.value / 100 if truth.percent else truth.value
    return any(math.isclose(value, expected, rel_tol=rel_tol, abs_tol=abs_tol) for value in values)


def final_quantity(text: str) -> Quantity | None:
    """Return the final number of a response, None without one."""
    text = after_thinking(text)
    for content in (boxed(text), tagged(text)):
        if content is not None and (only := _of_statement(plain(content))):
            return only[0] if len(only) == 1 else None
    text = plain(text)
    marked = text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
    statements = list(STATEMENT.finditer(text))
    stated = text[statements[-1].end() :].strip().partition("\n")[0] if statements else ""
    for numbers in (_of_statement(marked), quantities(EQUAL.split(stated)[-1])):
        if numbers:
            return None if _goes_on(numbers[0]) else numbers[0]
    numbers = quantities(text)
    return numbers[-1] if numbers else None


def _of_statement(content: str) -> list[Quantity | None]:
    """Return the numbers of a box, tag or mark, of its right side in an equation; `- 5` is negative there."""
    return quantities(LONE_SIGN.sub(r"\1", EQUAL.split(content)[-1]))


def _goes_on(number: Quantity | None) -> bool:
    """Return whether a number is only the beginning of what is stated: a range `3-5`, a time or a ratio `12:30`."""
    return number is not None and CONTINUATION.match(number.rest) is not None


def _truth(answer: str) -> tuple[Quantity, str]:
    """Return the number of a ground truth and its unit, "" without one."""
    numbers = quantities(plain(answer.rpartition("####")[2]).strip())
    if not numbers or numbers[0] is None or _goes_on(numbers[0]):
        raise DataError(f"the ground truth {quoted(answer)} contains no number")
    return numbers[0], unit_of(numbers[0].rest)
