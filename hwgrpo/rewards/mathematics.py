"""Mathematical equality through math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from hwgrpo.errors import quoted
from hwgrpo.rewards.verifiable import answer_text


def math(
    solution_str: str, ground_truth: Any, score: float = 1.0, format_score: float = 0.0, timeout: int = 5
) -> float:
    """Compare the response's final mathematical expression with the ground truth's.

    Args:
        solution_str: the response; a `\\boxed{}` expression is preferred.
        ground_truth: the answer, in LaTeX or plain; a bare one is taken as if in `\\boxed{}`.
        score: reward of an equal expression.
        format_score: reward of another expression.
        timeout: seconds for reading an expression and for each comparison; one that takes longer is wrong
            (`9^{9^{9}}` would keep a processor busy for hours).

    Returns:
        `score`, `format_score`, or 0 when the response has no expression.
    """
    arguments = (solution_str, answer_text(ground_truth), max(1, int(timeout)))
    # math-verify keeps time with a signal, which only a main thread can take: other threads ask a child process's.
    if threading.current_thread() is threading.main_thread():
        verdict = judge(*arguments)
    else:
        verdict = _child().submit(judge, *arguments).result()
    return {True: score, False: format_score, None: 0.0}[verdict]


def judge(solution: str, truth: str, timeout: int) -> bool | None:
    """Say whether two expressions are equal; None when the solution has none. Needs a main thread.

    Raises:
        ValueError: the ground truth cannot be read.
    """
    from math_verify import parse, verify

    bare = "\\boxed" not in truth and "$" not in truth.replace("\\$", "")  # `\$18` is money and bounds no formula
    gold = parse(f"\\boxed{{{truth}}}" if bare else truth, parsing_timeout=timeout)
    if not gold:
        raise ValueError(f"the ground truth {quoted(truth)} is not an expression that math-verify can read")
    answer = parse(solution, parsing_timeout=timeout)
    return verify(gold, answer, timeout_seconds=timeout) if answer else None


@functools.cache
def _child() -> ProcessPoolExecutor:
    """One process for all threads; started fresh, because a copy of a process with threads and devices may hang."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
