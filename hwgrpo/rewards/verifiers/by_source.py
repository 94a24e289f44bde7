"""The reward of a row's source: one data set may have rows of several, each scored by its own rule."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.errors import DataError, choice_error, quoted
from hwgrpo.rewards.mathematics import math
from hwgrpo.rewards.verifiable import exact_match
from hwgrpo.rewards.verifiers.geo3k import geo3k
from hwgrpo.rewards.verifiers.gsm8k import gsm8k
from hwgrpo.rewards.verifiers.question_answers import question_exact_match

REWARDS = {
    "exact_match": exact_match,
    "geo3k": geo3k,
    "gsm8k": gsm8k,
    "math": math,
    "question_exact_match": question_exact_match,
}
"""Rewards that a source can have."""


def _signed_math(solution_str: str, ground_truth: Any) -> float:
    """Return the reward of `math`, -1 where the answer is wrong, as verl's `math_dapo` does."""
    return 2 * math(solution_str, ground_truth) - 1


SOURCES: tuple[tuple[str, Callable[[str, Any], float]], ...] = (
    (r"openai/gsm8k", functools.partial(gsm8k, method="strict")),
    (r"lighteval/MATH|DigitalLearningGmbH/MATH-lighteval|HuggingFaceH4/MATH-500", math),
    (r"numina_(aops_forum|synthetic_math|amc_aime|synthetic_amc|cn_k12|olympiads)", math),
    (r"math|math_dapo|math_dapo_reasoning|aime.*", _signed_math),
    (r"hiyouga/geometry3k", geo3k),
    (r"searchR1_(nq|triviaqa|popqa|hotpotqa|2wikimultihopqa|musique|bamboogle)", question_exact_match),
)
"""The sources that verl scores -> the reward."""


def by_source(
    data_source: str, solution_str: str, ground_truth: Any, sources: Mapping[str, str] | None = None
) -> float:
    """Score a response by the rule of its row's `data_source`, as verl does where no function is named.

    Args:
        data_source: the row's source.
        solution_str: the response.
        ground_truth: the answer.
        sources: further sources -> exact_match, geo3k, gsm8k, math or question_exact_match, each with its defaults; a
            source that verl scores may be among them.

    Returns:
        0 or 1; -1 or 1 for `math`, `math_dapo`, `math_dapo_reasoning` and `aime...`; 0, 0.1, 0.9 or 1 for
        `hiyouga/geometry3k`. math-verify compares mathematics, mathruler geometry.

    Raises:
        ConfigError: `sources` names another reward.
        DataError: nothing is known of the source.
    """
    own = dict(sources or {})
    for name in own.values():
        if name not in REWARDS:
            raise choice_error("kwargs.sources of reward by_source", name, REWARDS)
    if data_source in own:
        return REWARDS[own[data_source]](solution_str, ground_truth)
    rule = next((rule for pattern, rule in SOURCES if re.fullmatch(pattern, data_source)), None)
    if rule is None:
        raise DataError(
            f"reward by_source has no rule for data_source={quoted(data_source)}; name one with kwargs.sources, e.g. "
            f"sources: {{{quoted(data_source)}: math}}, or use a reward of your own"
        )
    return rule(solution_str, ground_truth)
