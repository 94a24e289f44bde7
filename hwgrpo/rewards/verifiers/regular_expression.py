"""A regular expression that a response must match."""

from __future__ import annotations

import functools
import re
from typing import Any

from hwgrpo.errors import ConfigError, DataError, choice_error
from hwgrpo.rewards.ground_truths import right_answers
from hwgrpo.rewards.response_text import continued

MODES = ("search", "fullmatch")


def regex(
    solution_str: str,
    ground_truth: Any,
    pattern: str | None = None,
    mode: str = "search",
    ignore_case: bool = False,
    score: float = 1.0,
    opened_markers: str = "",
) -> float:
    """Return `score` when a regular expression matches the response, else 0.

    Python's `re` can take exponential time for some patterns; give a function with such a pattern a `timeout`.

    Args:
        solution_str: the response; white space around it is ignored.
        ground_truth: the pattern of the row, where `pattern` is None; of a list any.
        pattern: the regular expression, `.` matching line ends, `^` and `$` at each line; None: the ground truth.
        mode: "search": it matches anywhere; "fullmatch": it matches the full response.
        ignore_case: whether letters match in either case.
        score: reward of a match.
        opened_markers: markers at the prompt's end; those that the pattern names count as the response's.

    Raises:
        ConfigError: the pattern or the mode is wrong.
        DataError: the ground truth is no regular expression.
    """
    if mode not in MODES:
        raise choice_error("kwargs.mode of reward regex", mode, MODES)
    flags = re.DOTALL | re.MULTILINE | (re.IGNORECASE if ignore_case else 0)
    try:
        patterns = right_answers(ground_truth) if pattern is None else [pattern]
        compiled = [_compiled(each, flags) for each in patterns]
    except (re.error, OverflowError, RecursionError) as error:
        if pattern is None:
            raise DataError(f"the ground truth {ground_truth!r} is no regular expression: {error}") from error
        raise ConfigError(f"kwargs.pattern={pattern!r} of reward regex is no regular expression: {error}") from error
    for each in compiled:
        text = continued(solution_str, opened_markers, each.pattern).strip()
        if each.search(text) if mode == "search" else each.fullmatch(text):
            return score
    return 0.0


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)
