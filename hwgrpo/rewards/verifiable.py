"""Rule-based rewards: equality, the final number, the format, the length."""

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
    """Return 1 when the response equals the ground truth after stripping white space, else 0."""
    return float(solution_str.strip() == answer_text(ground_truth).strip())


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", score: float = 1.0, format_score: float = 0.0
) -> float:
    """Compare the response's final number with the ground truth's, as verl's rule for GSM8K does.

    Args:
        solution_str: the response.
        ground_truth: the answer, `18` or a full GSM8K solution that ends in `#### 18`.
        method: "strict" uses the last number after `####`, "flexible" the last number in the response.
        score: reward of the correct number.
        format_score: reward of a wrong number in the expected place.

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
    """Return the last number of a text (the last after `####` when `marked`), thousands separators and $ removed."""
    numbers = (MARKED_NUMBER if marked else NUMBER).findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None


def format_reward(
    solution_str: str, pattern: str | None = None, tags: Sequence[str] = ("think", "answer"), score: float = 1.0
) -> float:
    """Return `score` when the full response has the required format, else 0.

    Args:
        solution_str: the response; white space around it is ignored.
        pattern: regular expression for the full response, `.` matching line ends too; None uses `tags`.
        tags: the response is `<tag>...</tag>` for each of these in order, each once, with only white space between.
        score: reward of the required format.
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
    """Penalize responses near the length limit: 0 up to `max - buffer`, then linear to -factor at `max`.

    Args:
        batch: the prompts, unused.
        completions: the responses; lengths include the stop token.
        max_response_tokens: the limit; `rollout.max_response_tokens` unless stated.
        buffer: tokens over which the penalty grows; None uses a quarter of the limit.
        factor: penalty at the limit.
        floor: keep -factor beyond the limit (TRL, OpenRLHF) instead of a growing penalty (verl).

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
    """Return a ground truth as text; raise DataError for a row without one."""
    if ground_truth is None:
        raise DataError("the row has no ground truth; name its column with data.ground_truth_key")
    return str(ground_truth)
