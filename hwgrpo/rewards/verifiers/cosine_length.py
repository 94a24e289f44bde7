"""The cosine reward: correctness, weighed by the length of the response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.rewards.signatures import load_function, make_reward_function
from hwgrpo.values import Completions, PromptBatch

KEY = "kwargs.correct of reward length_cosine"


def length_cosine(
    batch: PromptBatch,
    completions: Completions,
    *,
    correct: str,
    max_response_tokens: int,
    correct_kwargs: Mapping[str, Any] | None = None,
    threshold: float = 0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    exceed: float | None = None,
) -> list[float | None]:
    """Move along half a cosine over the length: short correct responses get most, short wrong ones least.

    A correct response of l tokens has min_value_correct + (max_value_correct - min_value_correct) c(l), a wrong one
    max_value_wrong - (max_value_wrong - min_value_wrong) c(l), where c(l) = (1 + cos(pi min(l / max, 1))) / 2. It
    contains correctness, so use it in the place of the reward named by `correct`.

    Args:
        batch: the prompts.
        completions: the responses; lengths include the stop token.
        correct: a registered reward or `path/to/file.py:function`, called once more for this.
        max_response_tokens: the length limit `max`; `rollout.max_response_tokens` unless stated.
        correct_kwargs: its arguments.
        threshold: a response is correct where that reward is above this.
        min_value_correct, max_value_correct: of a correct response at the limit and of length 0.
        min_value_wrong, max_value_wrong: of a wrong response of length 0 and at the limit.
        exceed: of any response at the limit or beyond; None: as given by the cosine.

    Returns:
        One number per response, None where `correct` returned none.

    Raises:
        ConfigError: the limit is not positive, or `correct` cannot be found or called.

    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), appendix C.1, whose values are
    1 and 2, -10 and 0, exceed -10; the defaults are those of TRL.
    """
    if max_response_tokens < 1:
        raise ConfigError(f"kwargs.max_response_tokens={max_response_tokens} of reward length_cosine; allowed: from 1")
    context = {"max_response_tokens": max_response_tokens}
    function = make_reward_function(*load_function(correct, KEY), correct_kwargs or {}, context, KEY)
    verdicts, _ = function.values(batch, completions, None)
    rewards: list[float | None] = []
    for verdict, length in zip(verdicts, completions.longest_rows.tolist(), strict=True):
        if isinstance(verdict, BaseException):
            raise verdict
        number = number_of(verdict.get("score") if isinstance(verdict, Mapping) else verdict)
        cosine = (1 + math.cos(math.pi * min(length / max_response_tokens, 1))) / 2
        if number is None or math.isnan(number):
            rewards.append(None)
        elif exceed is not None and length >= max_response_tokens:
            rewards.append(exceed)
        elif number > threshold:
            rewards.append(min_value_correct + (max_value_correct - min_value_correct) * cosine)
        else:
            rewards.append(max_value_wrong + (min_value_wrong - max_value_wrong) * cosine)
    return rewards
