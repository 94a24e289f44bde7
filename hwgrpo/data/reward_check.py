"""Could a reward score these rows? It is tried on each row's own answer, written in the ways that responses are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwgrpo.data.published import reward_of
from hwgrpo.errors import error_text, quoted
from hwgrpo.rewards.failures import told
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.rewards.processes.reward_process import Reward
from hwgrpo.rewards.reward_loading import load_function
from hwgrpo.rewards.signatures import adapt
from hwgrpo.rewards.verifiable import answer_text
from hwgrpo.values import Prompt

COMPARING = ("exact_match", "gsm8k", "math")
"""Rewards that give more for a row's own answer than for nothing, whatever the row."""
FORMS = ("\\boxed{{{}}}", "#### {}", "{}")
"""Responses that hold an answer and nothing else."""


@dataclass(frozen=True)
class Judged:
    """What a reward made of rows."""

    reward: str
    tried: int
    """Rows that it was tried on."""
    scored: int
    """Rows whose own answer it gives more than an empty response."""
    failed: int
    """Rows on which it raised."""
    why_not: str | None = None
    """Why it was not tried."""


def judge_rows(prompts: Sequence[Prompt], rewards: Sequence[Reward] | None) -> tuple[list[Judged], dict[int, str]]:
    """Try rewards on rows.

    Args:
        prompts: the rows, each with an answer.
        rewards: the functions; None takes for each row the one that belongs to its source, if any.

    Returns:
        What each reward made of its rows, and number of the row (in `prompts`) -> why it cannot be scored.
    """
    judged, unscored = [], {}
    for reward, numbers in _by_reward(prompts, rewards):
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
        if reward.name in COMPARING:
            missed = [number for number, verdict in verdicts.items() if verdict is False]
            why = f"reward {reward.name} gives the row's own ground truth no more than an empty response"
            unscored |= dict.fromkeys(missed, why)
    return judged, unscored


def _by_reward(prompts: Sequence[Prompt], rewards: Sequence[Reward] | None) -> list[tuple[Reward, list[int]]]:
    if rewards is not None:
        return [(reward, list(range(len(prompts)))) for reward in rewards]
    numbers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        name = reward_of(prompt.source)
        if name is not None:
            numbers.setdefault(name, []).append(number)
    return [(adapt(*load_function(name, name), {}, {}, name), rows) for name, rows in numbers.items()]


def _try(reward: Reward, prompt: Prompt) -> bool | Exception:
    """Say whether the row's own answer, in some form, gets more than an empty response; or return what was raised."""
    answer = answer_text(prompt.ground_truth)
    nothing = _score(reward, prompt, "")
    if isinstance(nothing, Exception):
        return nothing
    for form in FORMS:
        value = _score(reward, prompt, form.format(answer))
        if isinstance(value, Exception):
            return value
        if value > nothing:
            return True
    return False


def _score(reward: Reward, prompt: Prompt, response: str) -> float | Exception:
    value: Any = reward.per_sample([prompt], [response])[0]
    if isinstance(value, Mapping):
        value = value.get("score")
    if isinstance(value, BaseException):
        return value if isinstance(value, Exception) else RuntimeError(f"it {told(value)}")
    number = number_of(value)
    if number is not None and math.isfinite(number):
        return number
    return TypeError(f"it returned {quoted(value)}, not a finite number")
