"""Mathematical equality through math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.pool
import threading
from collections.abc import Callable
from typing import Any

from hwgrpo.errors import quoted
from hwgrpo.rewards.ground_truths import right_answers

STEPS = 20
"""Upper bound on a verdict's time, in timeouts: a few for parsing, and one for each compared pair."""


def math(
    solution_str: str, ground_truth: Any, score: float = 1.0, format_score: float = 0.0, timeout: int = 5
) -> float:
    """Compare the response's final mathematical expression with the ground truth's.

    Args:
        solution_str: the response; a `\\boxed{}` expression is preferred.
        ground_truth: the answer, in LaTeX or plain; a bare one is parsed as if in `\\boxed{}`. Of a list any.
        score: reward of an equal expression.
        format_score: reward of another expression.
        timeout: seconds for parsing an expression and for each comparison; beyond it the answer is wrong
            (`9^{9^{9}}` would take hours).

    Returns:
        `score`, `format_score`, or 0 when the response has no expression.
    """
    verdicts = [_verdict(solution_str, truth, max(1, int(timeout))) for truth in right_answers(ground_truth)]
    return {True: score, False: format_score, None: 0.0}[True if True in verdicts else verdicts[0]]


def _verdict(*arguments: Any) -> bool | None:
    """Return what `judge` returns, in any thread."""
    # math-verify uses a signal as timer, which only a main thread receives: other threads use a child process.
    if threading.current_thread() is threading.main_thread():
        return judge(*arguments)
    try:
        return _CHILD.call(judge, *arguments, seconds=STEPS * arguments[2])
    except multiprocessing.TimeoutError:  # in a computation that no signal interrupts
        return False


def judge(solution: str, truth: str, timeout: int) -> bool | None:
    """Return whether two expressions are equal; None when the solution has none. Needs a main thread.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import parse, verify

    bare = "\\boxed" not in truth and "$" not in truth.replace("\\$", "")  # `\$18` is money and bounds no formula
    gold = parse(f"\\boxed{{{truth}}}" if bare else truth, parsing_timeout=timeout)
    if not gold:
        raise ValueError(f"the ground truth {quoted(truth)} is not an expression that math-verify can parse")
    answer = parse(solution, parsing_timeout=timeout)
    return verify(gold, answer, timeout_seconds=timeout) if answer else None


class _Child:
    """One process that serves calls of all threads, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: multiprocessing.pool.Pool | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """Call a function in the child process.

        Raises:
            multiprocessing.TimeoutError: it took longer, or its process died; the next call starts a new process.
        """
        with self._lock:
            if self._pool is None:
                # Spawned, since a fork of a process with threads and devices may hang.
                self._pool = multiprocessing.get_context("spawn").Pool(1)
                atexit.register(self._pool.terminate)
                self._pool.apply_async(judge, ("1", "1", 1)).get(START_TIMEOUT)  # imports what it needs
            try:
                return self._pool.apply_async(function, arguments).get(seconds)
            except multiprocessing.TimeoutError:
                self._pool.terminate()
                self._pool = None
                raise


START_TIMEOUT = 300.0
"""Seconds for a process to start and to import math-verify, on a busy host."""
_CHILD = _Child()
