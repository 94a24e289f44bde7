"""Check whether rewards can score rows: each scores the row's own answer in the usual formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwgrpo.data.published import reward_of
from hwgrpo.errors import ConfigError, DataError, error_text, quoted
from hwgrpo.rewards.failures import describe_failure
from hwgrpo.rewards.ground_truths import own_answer
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.rewards.processes.reward_process import Reward
from hwgrpo.rewards.signatures import load_function, make_reward_function
from hwgrpo.values import Prompt

COMPARING = (
    *("exact_match", "geo3k", "gsm8k", "math", "multiple_choice", "numeric"),
    *("question_exact_match", "question_f1"),
)
"""Rewards that compare with the ground truth."""
_SCORES_OWN = (*COMPARING, "by_source")
"""Rewards that must give a row's own ground truth more than an empty response."""
FORMS = ("\\boxed{{{}}}", "#### {}", "{}", "<think></think><answer>{}</answer>", "```\n{}\n```")
"""Formats of a response with only the answer."""


@dataclass(frozen=True)
class Judged:
    """Result of checking a reward on rows."""

    reward: str
    tried: int
    """Number of rows checked."""
    scored: int
    """Number of rows whose own answer got more than an empty response."""
    failed: int
    """Number of rows on which it raised."""
    why_not: str | None = None
    """Why it was not checked."""
    unanswered: bool = False
    """Whether the rows alone were checked, by the reward's `check_prompt`, and no answer was scored."""


def judge_rows(prompts: Sequence[Prompt], rewards: Sequence[Reward] | None) -> tuple[list[Judged], dict[int, str]]:
    """Check rewards on rows.

    Args:
        prompts: the rows, each with an answer.
        rewards: the functions; None uses the built-in reward of each row's source, if any.

    Returns:
        The result per reward, and index of a row in `prompts` -> why it cannot be scored.
    """
    judged, unscored = [], {}
    for reward, numbers in _by_reward(prompts, rewards):
        if isinstance(reward, Judged):
            judged.append(reward)
            continue
        if reward.prompt_check is not None:
            continue  # `check_rows` has it
        if reward.form != "verl":
            why = "it is called with entire batches; hwgrpo train RECIPE --dry-run tries it"
            judged.append(Judged(reward.name, 0, 0, 0, why))
            continue
        verdicts = {number: _try(reward, prompts[number]) for number in numbers}
        raised = {number: verdict for number, verdict in verdicts.items() if isinstance(verdict, Exception)}
        scored = sum(verdict is True for verdict in verdicts.values())
        judged.append(Judged(reward.name, len(verdicts), scored, len(raised)))
        for number, error in raised.items():
            unscored[number] = f"reward {reward.name} fails: {error_text(error) or type(error).__name__}"
        if reward.name in _SCORES_OWN:
            missed = [number for number, verdict in verdicts.items() if verdict is False]
            why = f"reward {reward.name} gives the row's own ground truth no more than an empty response"
            unscored |= dict.fromkeys(missed, why)
    return judged, unscored


def check_rows(prompts: Sequence[Prompt], rewards: Sequence[Reward] | None) -> tuple[list[Judged], dict[int, str]]:
    """Call the `check_prompt` of rewards that have one on rows, with or without an answer; else as `judge_rows`."""
    judged, unscored = [], {}
    for reward, numbers in _by_reward(prompts, rewards):
        if isinstance(reward, Judged) or (check := reward.prompt_check) is None:
            continue
        refused = {}
        for number in numbers:
            try:
                check(prompts[number])
            except DataError as error:
                refused[number] = str(error).removeprefix(f"{prompts[number].place}: ")
        judged.append(Judged(reward.name, len(numbers), len(numbers) - len(refused), len(refused), unanswered=True))
        unscored |= refused
    return judged, unscored


def _by_reward(prompts: Sequence[Prompt], rewards: Sequence[Reward] | None) -> list[tuple[Reward | Judged, list[int]]]:
    """Return the rewards, each with the indices of its prompts; or why a built-in one cannot be loaded."""
    if rewards is not None:
        return [(reward, list(range(len(prompts)))) for reward in rewards]
    numbers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        name = reward_of(prompt.source)
        if name is not None:
            numbers.setdefault(name, []).append(number)
    return [(_built_in(name), rows) for name, rows in numbers.items()]


def _built_in(name: str) -> Reward | Judged:
    try:
        return make_reward_function(*load_function(name, name), {}, {}, name)
    except ConfigError as missing:
        return Judged(name, 0, 0, 0, str(missing))


def _try(reward: Reward, prompt: Prompt) -> bool | Exception:
    """Return whether the row's own answer in any format gets more than an empty response, or an exception."""
    answer = own_answer(prompt.ground_truth) or ""
    baseline = _score(reward, prompt, "")
    if isinstance(baseline, Exception):
        return baseline
    for form in FORMS:
        value = _score(reward, prompt, form.format(answer))
        if isinstance(value, Exception):
            return value
        if value > baseline:
            return True
    return False


def _score(reward: Reward, prompt: Prompt, response: str) -> float | Exception:
    value: Any = reward.per_sample([prompt], [response])[0]
    if isinstance(value, Mapping):
        value = value.get("score")
    if isinstance(value, BaseException):
        return value if isinstance(value, Exception) else RuntimeError(f"it {describe_failure(value)}")
    number = number_of(value)
    if number is not None and math.isfinite(number):
        return number
    return TypeError(f"it returned {quoted(value)}, not a finite number")
