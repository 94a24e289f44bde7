"""The reward functions of `trl.rewards`: the same signatures and results."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PARSING_SECONDS, COMPARING_SECONDS = 10, 5
_UNREADABLE = "[unparseable]"
Extra = Callable[[str, list[Any]], None]
"""Logs a column of the responses: (name, values)."""


def accuracy_reward(
    completions: list[Any], solution: list[str], log_extra: Extra | None = None, **kwargs: Any
) -> list[float | None]:
    """Compare the last formula of responses with the solution, by math-verify.

    Outside of the main thread a comparison has no time limit, which needs a signal.

    Args:
        completions: lists of one message, or texts.
        solution: a solution for each.
        log_extra: logs the solutions and both parsed formulas.
        **kwargs: other columns, unused.

    Returns:
        1 for an equal formula, 0 for another or none; None where the solution is no formula.
    """
    return _compare([_text(each) for each in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Extra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Score the text after the reasoning as `accuracy_reward`; a response whose reasoning does not end gets 0.

    Args:
        completions, solution, log_extra, **kwargs: as for `accuracy_reward`.
        reasoning_delimiters: ends of the reasoning, of which the first that occurs counts; None: `</think>`.
    """
    ends = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers: list[str | None] = []
    for text in map(_text, completions):
        end = next((each for each in ends if each in text), None)
        answers.append(None if end is None else text.rpartition(end)[2])
    return _compare(answers, solution, log_extra)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 for responses that begin with `<think>`, open it once and close it, else 0.

    Args:
        completions: lists of one message, or texts.
        **kwargs: columns, unused.
    """
    rewards = []
    for text in map(_text, completions):
        before, opened, rest = text.partition("<think>")
        rewards.append(float(bool(opened) and not before and "<think>" not in rest and "</think>" in rest))
    return rewards


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Return a reward of correctness and length: half a cosine from the shortest to the longest response.

    Args:
        max_len: tokens from which on a response counts as longest.
        min_value_wrong, max_value_wrong: reward of the shortest and of the longest wrong response.
        min_value_correct, max_value_correct: reward of the longest and of the shortest correct response.
    """
    return _CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Return a penalty of the share of a response's n-grams of tokens that occurred before.

    Args:
        ngram_size: tokens of an n-gram; shorter responses get 0.
        max_penalty: reward if all were repeated.

    Raises:
        ValueError: max_penalty is above 0.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} must be 0 or below, e.g. -1.0")
    return _RepetitionPenalty(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return DAPO's penalty of long responses (arXiv 2503.14476, equation 13).

    Args:
        max_completion_len: tokens above which the reward is -1.
        soft_punish_cache: number of tokens below it over which the reward falls from 0.
    """
    return _SoftOverlong(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class _CosineScaled:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float

    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: list[Any], solution: list[str], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        correct = accuracy_reward(completions, solution)
        return [None if each is None else self._scaled(each, len(ids)) for each, ids in zip(correct, completion_ids)]

    def _scaled(self, correct: float, length: int) -> float:
        longest, shortest = self.max_value_wrong, self.min_value_wrong
        if correct:
            longest, shortest = self.min_value_correct, self.max_value_correct
        share = 0.5 * (1.0 + math.cos(math.pi * min(length / self.max_len, 1.0)))
        return longest + (shortest - longest) * share


@dataclass(frozen=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float

    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        number = len(ids) - self.ngram_size + 1
        different = {tuple(ids[start : start + self.ngram_size]) for start in range(number)}
        return (1 - len(different) / number) * self.max_penalty if len(different) < number else 0.0


@dataclass(frozen=True)
class _SoftOverlong:
    max_completion_len: int
    soft_punish_cache: int

    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        over = length - (self.max_completion_len - self.soft_punish_cache)
        if over <= 0:
            return 0.0
        return -1.0 if length > self.max_completion_len else -over / self.soft_punish_cache


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _compare(answers: Sequence[str | None], solutions: Sequence[str], log_extra: Extra | None) -> list[float | None]:
    """Return the rewards of answers; None as an answer is a reasoning that does not end."""
    judged = [
        (0.0, *["[incomplete reasoning]"] * 2) if answer is None else _judge(answer, solution)
        for answer, solution in zip(answers, solutions, strict=True)
    ]
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", [each[1] for each in judged])
        log_extra("answer_parsed", [each[2] for each in judged])
    return [each[0] for each in judged]


def _judge(answer: str, solution: str) -> tuple[float | None, str, str]:
    """Return the reward of an answer, and the formulas of the solution and of the answer as text."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    from hwgrpo.rewards.mathematics import shorten_timeout_warnings

    shorten_timeout_warnings()
    main = threading.current_thread() is threading.main_thread()
    if not main:  # math-verify would warn at each call that its timer, a signal, is off
        for name in ("parser", "grader"):
            logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    limit: Any = PARSING_SECONDS if main else None
    gold = parse(solution, parsing_timeout=limit)
    if not gold:
        return None, _UNREADABLE, "[skipped]"
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    found = parse(answer, [extraction], extraction_mode="first_match", parsing_timeout=limit)
    equal = verify(gold, found, timeout_seconds=COMPARING_SECONDS if main else None)
    return float(equal), str(gold), str(found) if found else _UNREADABLE
