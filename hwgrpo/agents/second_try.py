"""The environment `second_try`: a reward function's verdict on a response, and a chance to correct it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.agents.action import Action, StepResult
from hwgrpo.catalog import REWARDS
from hwgrpo.data.agent_tasks import VERDICT
from hwgrpo.data.row_schema import read_ground_truth
from hwgrpo.errors import ConfigError
from hwgrpo.rewards.signatures import make_reward_function
from hwgrpo.values import Prompt


class SecondTry:
    """A task whose response is scored after each turn, until it is right or no tries are left.

    Args:
        scorer: a registered reward, or `path/to/file.py:function`, of verl's form.
        tries: most turns.
        right: least score that counts as right.
        verdict: what the policy reads after a wrong response.
        discount: factor of the score for each further try, so that the first one counts most.
        scorer_kwargs: further arguments of the scorer.
        ground_truth_key: column with the answer, as `data.ground_truth_key`; None: one of the usual names.
    """

    def __init__(
        self,
        scorer: str = "reasoning_gym",
        tries: int = 2,
        right: float = 1.0,
        verdict: str = VERDICT,
        discount: float = 0.5,
        scorer_kwargs: Mapping[str, Any] | None = None,
        ground_truth_key: str | None = None,
    ) -> None:
        self._function = make_reward_function(
            scorer, REWARDS.load(scorer), dict(scorer_kwargs or {}), {}, "second_try.scorer"
        )
        if self._function.form != "verl":
            raise ConfigError(f"scorer={scorer!r} is called with all responses of a batch; use one of verl's form")
        self._tries, self._right, self._verdict, self._discount = tries, right, verdict, discount
        self._ground_truth_key = ground_truth_key

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin with a row, whose prompt is its own."""
        answer = read_ground_truth(dict(row), self._ground_truth_key, "row")
        self._prompt = Prompt("", str(row.get("prompt", "")), (), answer, row, source=str(row.get("data_source", "")))
        self._done = 0

    def step(self, action: Action) -> StepResult:
        """Score a response; the reward is that of the last one."""
        (value,) = self._function.per_sample([self._prompt], [action.content])
        if isinstance(value, BaseException):
            raise value
        score = float(value["score"] if isinstance(value, Mapping) else value)
        factor, self._done = self._discount**self._done, self._done + 1
        last = score >= self._right or self._done == self._tries
        return StepResult(self._verdict, reward=score * factor if last else 0.0, done=last)

    def state(self) -> str:
        """Return the number of the try."""
        return str(self._done)
