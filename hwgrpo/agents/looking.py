"""The environment `looking`: a picture that is shown to a policy that asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.agents.action import Action, StepResult
from hwgrpo.data.picture_tasks import LOOK


class Looking:
    """A question about a picture, which the policy sees once it says `look`. The reward is 1 if its answer is right.

    Args:
        picture_key: column of the row with the picture's file, in base64.
        answer_key: column with the answer.
    """

    def __init__(self, picture_key: str = "picture", answer_key: str = "ground_truth") -> None:
        self._picture_key, self._answer_key = picture_key, answer_key

    def reset(self, row: Mapping[str, Any]) -> None:
        """Hide the row's picture; the prompt is the row's."""
        self._picture, self._answer, self._looked = str(row[self._picture_key]), str(row[self._answer_key]), False

    def step(self, action: Action) -> StepResult:
        """Show the picture, once; or take an answer."""
        if action.content.strip() == LOOK and not self._looked:
            self._looked = True
            picture = {"type": "image", "base64": self._picture}
            return StepResult([{"role": "user", "content": [picture]}])
        return StepResult("", reward=float(action.content.strip() == self._answer), done=True)
