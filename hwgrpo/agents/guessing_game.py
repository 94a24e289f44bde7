"""The environment `guessing_game`: a hidden number, and whether it is higher or lower than each guess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.agents.action import Action, StepResult
from hwgrpo.data.agent_tasks import GUESSES, HIGHER, LOWER


class GuessingGame:
    """A hidden number that is guessed in a few turns. The reward is 1 for the turn that names it.

    Args:
        turns: most guesses.
        key: column of the row with the number.
    """

    def __init__(self, turns: int = GUESSES, key: str = "ground_truth") -> None:
        self._turns, self._key = turns, key
        self._guesses: list[str] = []

    def reset(self, row: Mapping[str, Any]) -> None:
        """Hide the row's number; the prompt is the row's."""
        self._number = int(row[self._key])
        self._guesses = []

    def step(self, action: Action) -> StepResult:
        """Answer a guess with `higher` or `lower`; one that is no number costs a turn."""
        guess = action.content.strip()
        self._guesses.append(guess)
        last = len(self._guesses) == self._turns
        if not guess.isdecimal():
            return StepResult("Answer with a number.", done=last)
        if int(guess) == self._number:
            return StepResult("", reward=1.0, done=True)
        return StepResult(HIGHER if int(guess) < self._number else LOWER, done=last)

    def state(self) -> str:
        """Return the guesses so far: what the next one is chosen by."""
        return " ".join(self._guesses)
