"""Verl's reward of Geometry3K: the answer by the package mathruler, and the form of the response."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.processes.limited_reward import LimitedReward

INSTALL = 'pip install "hwgrpo[rewards]"'
PACKAGE = "mathruler.grader"


def geo3k(solution_str: str, ground_truth: Any, format_score: float = 0.1, timeout: float | None = 5.0) -> float:
    r"""Return `(1 - format_score)` for a right answer plus `format_score` for the form of the response.

    The answer is that of the last `\boxed{}`, compared as `mathruler.grader.grade_answer` does. The form is verl's:
    `<think>` begins the response, and `</think>` and a `\boxed{}` follow.

    Args:
        solution_str: the response.
        ground_truth: the answer, in LaTeX or plain; of a list any.
        format_score: share of the form.
        timeout: seconds for a comparison, which mathruler itself does not limit; beyond it the answer is wrong. The
            comparison runs in a process that is killed then. None: in this process, without a limit.

    Returns:
        0, `format_score`, `1 - format_score` or 1.

    Raises:
        ConfigError: mathruler is missing, or an argument is out of range.
    """
    right = any(_is_right(solution_str, truth, timeout) for truth in right_answers(ground_truth))
    return (1.0 - format_score) * right + format_score * has_form(solution_str)


def check_arguments(*, format_score: float = 0.1, timeout: float | None = 5.0) -> None:
    """Raise `ConfigError` for a share that is none, a limit that is none, or a missing package."""
    for name, value, most in (("format_score", format_score, 1.0), ("timeout", timeout, float("inf"))):
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
        if value is None and name == "timeout":
            continue
        if not number or (name == "timeout" and value == 0):
            allowed = "0 to 1" if name == "format_score" else "seconds above 0, or null for no limit"
            raise ConfigError(f"kwargs.{name}={shown(value)} of reward geo3k; allowed: {allowed}")
    grader()


setattr(geo3k, "check_arguments", check_arguments)  # noqa: B010 - a function's attribute has no type


def has_form(text: str) -> bool:
    r"""Return whether a response is `<think>...</think>...\boxed{...}...`, by verl's pattern, in linear time."""
    if not text.startswith("<think>"):
        return False
    _, closed, rest = text[len("<think>") :].partition("</think>")
    _, opened, rest = rest.partition("\\boxed{")
    return bool(closed and opened and "}" in rest)


@functools.cache
def grader() -> Any:
    """Return mathruler's module.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as missing:
        raise ConfigError(
            f"verl's reward of Geometry3K (geo3k) needs the packages mathruler and pylatexenc ({missing}): {INSTALL}"
        ) from missing


def _is_right(solution: str, truth: str, timeout: float | None) -> bool:
    if timeout is None:
        package = grader()
        return package.grade_answer(package.extract_boxed_content(solution), truth)
    grader()
    return _compared(timeout).call(solution, truth) == 1.0


@functools.cache
def _compared(timeout: float) -> LimitedReward:
    return LimitedReward("geo3k", {"format_score": 0.0, "timeout": None}, (PACKAGE,), timeout)
