"""Mathematical equality through math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from hwgrpo.errors import quoted
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.processes.limited_reward import LimitedReward

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
    return _in_child(*arguments)


def judge(solution: str, truth: str, timeout: int) -> bool | None:
    """Return whether two expressions are equal; None when the solution has none. Needs a main thread.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import parse, verify

    shorten_timeout_warnings()
    bare = "\\boxed" not in truth and "$" not in truth.replace("\\$", "")  # `\$18` is money and bounds no formula
    gold = parse(f"\\boxed{{{truth}}}" if bare else truth, parsing_timeout=timeout)
    if not gold:
        raise ValueError(f"the ground truth {quoted(truth)} is not an expression that math-verify can parse")
    answer = parse(solution, parsing_timeout=timeout)
    return verify(gold, answer, timeout_seconds=timeout) if answer else None


@functools.cache
def shorten_timeout_warnings() -> None:
    """Have math-verify name a timeout once, without the response, which it would print as it is each time."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_FirstTimeout().shorten)


class _FirstTimeout:
    """What of math-verify's log records is shown."""

    def __init__(self) -> None:
        self._seen = False

    def shorten(self, record: logging.LogRecord) -> bool:
        """Replace the text of the first timeout; return whether a record is shown."""
        if not str(record.msg).startswith("Timeout during"):
            return True
        first, self._seen = not self._seen, True
        step = str(record.msg).partition(":")[0].lower()
        record.msg, record.args = f"math-verify: {step} of an expression, which counts as wrong; shown once", ()
        return first


def _in_child(solution: str, truth: str, timeout: int) -> bool | None:
    """Return what `judge` returns; False where it took too long or ended its process."""
    value = _child(timeout).call(solution, truth)
    return False if value is None else {1.0: True, -1.0: False}.get(value)


@functools.cache
def _child(timeout: int) -> LimitedReward:
    kwargs = {"score": 1.0, "format_score": -1.0, "timeout": timeout}
    return LimitedReward("math", kwargs, ("math_verify",), STEPS * timeout)
