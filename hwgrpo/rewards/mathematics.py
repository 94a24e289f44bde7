"""Mathematical equality through math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer."""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import Any

from hwgrpo.errors import quoted
from hwgrpo.rewards.failures import ProcessDied, Raised, TimedOut
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.processes.worker_pool import Pool

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
    return _child(arguments[2]).call(*arguments[:2])


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


class _Child:
    """One process that serves calls of all threads, one at a time: an interpreter that does not run the user's script.

    Args:
        timeout: `math`'s.
    """

    def __init__(self, timeout: int) -> None:
        self._lock, self._timeout = threading.Lock(), timeout
        self._pool: Pool | None = None

    def call(self, solution: str, truth: str) -> bool | None:
        """Return the verdict of `judge`; False where it took too long or ended its process.

        Raises:
            ValueError: the ground truth cannot be parsed.
        """
        with self._lock:
            if self._pool is None:
                kwargs = {"score": 1.0, "format_score": -1.0, "timeout": self._timeout}
                setup = {"reward": "math", "name": "math", "key": "reward math", "kwargs": kwargs, "context": {}}
                setup |= {"folder": os.getcwd(), "plugins": ("math_verify",)}  # imported before the time counts
                self._pool = Pool(setup, 1, STEPS * self._timeout)
            (result,) = self._pool.run([{"solution_str": solution, "ground_truth": truth}], 0, None, ())
        if isinstance(result, TimedOut | ProcessDied):  # in a computation that no signal interrupts
            return False
        if isinstance(result, Raised) and result.kind == "ValueError":
            raise ValueError(result.text)
        if isinstance(result, Exception):
            raise result
        return {1.0: True, -1.0: False}.get(result["value"])


_child = functools.cache(_Child)
