"""Rewards that a rule decides: equality, the final number, the form, the length."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from hwgrpo.errors import ConfigError, DataError, choice_error, quoted
from hwgrpo.values import Completions, PromptBatch

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARKED_NUMBER = re.compile(rf"####\s*({NUMBER.pattern})")
GSM8K_METHODS = ("strict", "flexible")


def exact_match(solution_str: str, ground_truth: Any) -> float:
    """1 when the response equals the ground truth, white space around both aside, else 0."""
    return float(solution_str.strip() == answer_text(ground_truth).strip())


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", score: float = 1.0, format_score: float = 0.0
) -> float:
    """Compare the response's final number with the ground truth's, as verl's rule for GSM8K does.

    Args:
        solution_str: the response.
        ground_truth: the answer, `18` or a whole GSM8K solution that ends in `#### 18`.
        method: "strict" takes the last number after `####`, "flexible" the last number of all.
        score: reward of the right number.
        format_score: reward of a wrong number in the right place.

    Returns:
        `score`, `format_score`, or 0 without a number. Numbers are compared by value: `1,080.00` is `1080`.
    """
    if method not in GSM8K_METHODS:
        raise choice_error("kwargs.method of reward gsm8k", method, GSM8K_METHODS)
    text = answer_text(ground_truth)
    truth = final_number(text, marked="####" in text)
    if truth is None:
        raise DataError(f"the ground truth {quoted(text)} contains no number")
    answer = final_number(solution_str, marked=method == "strict")
    if answer is None:
        return 0.0
    return score if answer == truth else format_score


def final_number(text: str, marked: bool) -> Decimal | None:
    """Return the last number of a text (the last after `####` when `marked`), thousands' commas and $ removed."""
    found = (MARKED_NUMBER if marked else NUMBER).findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def format_reward(
    solution_str: str, pattern: str | None = None, tags: Sequence[str] = ("think", "answer"), score: float = 1.0
) -> float:
    """Return `score` when the whole response has the wanted form, else 0.

    Args:
        solution_str: the response; white space around it is ignored.
        pattern: regular expression for the whole response, `.` matching line ends too; None takes `tags`.
        tags: the response is `<tag>...</tag>` for each of these in order, each once, nothing but white space between.
        score: reward of the right form.
    """
    return score if _form(pattern, tuple(tags)).fullmatch(solution_str.strip()) else 0.0


@functools.lru_cache
def _form(pattern: str | None, tags: tuple[str, ...]) -> re.Pattern[str]:
    if pattern is None:
        names = [re.escape(tag) for tag in tags]
        body = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
        pattern = r"\s*".join(f"<{name}>{body}</{name}>" for name in names)
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"kwargs.pattern={pattern!r} of reward format is no regular expression: {error}") from error


def length_reward(
    batch: PromptBatch,
    completions: Completions,
    *,
    max_response_tokens: int,
    buffer: int | None = None,
    factor: float = 1.0,
    floor: bool = True,
) -> list[float]:
    """Punish responses that near the length limit: 0 up to `max - buffer`, then falling linearly to -factor at `max`.

    Args:
        batch: the prompts, unused.
        completions: their lengths count, the stop token included.
        max_response_tokens: the limit; `rollout.max_response_tokens` unless stated.
        buffer: tokens over which the punishment grows; None takes a quarter of the limit.
        factor: punishment at the limit.
        floor: beyond the limit stay at -factor (TRL, OpenRLHF) instead of falling on (verl).

    Returns:
        One number <= 0 per response. DAPO (arXiv 2503.14476), equation 13.
    """
    buffer = max_response_tokens // 4 if buffer is None else buffer
    if not 0 < buffer <= max_response_tokens:
        raise ConfigError(
            f"kwargs.buffer={buffer} of reward length; allowed: 1 to max_response_tokens={max_response_tokens}"
        )
    over = (completions.lengths - (max_response_tokens - buffer)).clamp(min=0, max=buffer if floor else None)
    return [-factor * tokens / buffer for tokens in over.tolist()]


def answer_text(ground_truth: Any) -> str:
    """Return a ground truth as text; a row without one is an error."""
    if ground_truth is None:
        raise DataError("the row has no ground truth; name its column with data.ground_truth_key")
    return str(ground_truth)
