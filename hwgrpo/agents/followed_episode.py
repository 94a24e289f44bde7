"""An episode that a person follows turn by turn, and in which the person may be the policy or the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hwgrpo.agents.action import Action, StepResult
from hwgrpo.agents.environments import Instance
from hwgrpo.agents.episode import EnvironmentWorkflow
from hwgrpo.errors import RunError
from hwgrpo.ragged import offsets_of
from hwgrpo.rollout.workflow import WorkflowParts
from hwgrpo.values import Completions, PromptBatch, Sampling

Ask = Callable[[], str | None]
"""Returns what the person says; None at the end of the input."""


class InputEnded(RunError):
    """The person has ended the input at a turn of the policy."""


class Display(Protocol):
    """Shows an episode."""

    def turn(self, action: Action) -> None:
        """Show a turn of the policy, before it is answered."""
        ...

    def answer(self, step: StepResult) -> None:
        """Show the answer to a turn."""
        ...


class FollowedWorkflow(EnvironmentWorkflow):
    """The workflow of `rollout.agent`, shown as it goes on.

    Args:
        parts: the run's settings, tokenizer and chat template.
        display: shows turns and answers.
        user: what the user says where there is no environment; None: the trajectory then ends.
    """

    def __init__(self, parts: WorkflowParts, display: Display, user: Ask | None = None) -> None:
        super().__init__(parts)
        self._display, self._user = display, user

    async def _answer(self, action: Action, instance: Instance | None, seconds: float) -> StepResult:
        self._display.turn(action)
        step = await super()._answer(action, instance, seconds)
        if step.done and instance is None and self._user is not None:
            said = self._user()
            return StepResult("", done=True) if said is None else StepResult(said)
        self._display.answer(step)
        return step


class PersonEngine:
    """An engine whose turns a person types.

    Args:
        tokenizer: of the turns; its end-of-sequence token ends each.
        ask: what the person says.
    """

    notes: Sequence[str] = ()
    metrics: Mapping[str, float] = {}

    def __init__(self, tokenizer: Any, ask: Ask) -> None:
        self._tokenizer, self._ask = tokenizer, ask

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return what the person says to each prompt, cut at the limit of tokens.

        Raises:
            InputEnded: the person says nothing more.
        """
        turns, texts = [], []
        for _ in batch.prompts:
            said = self._ask()
            if said is None:
                raise InputEnded("the input has ended")
            tokens = [*self._tokenizer.encode(said, add_special_tokens=False), self._tokenizer.eos_token_id]
            turns.append(tokens[: sampling.max_response_tokens])
            texts.append(said if len(turns[-1]) == len(tokens) else self._tokenizer.decode(turns[-1]))
        tokens_R = torch.tensor([token for turn in turns for token in turn])
        return Completions(
            prompt_index=torch.arange(len(turns)),
            tokens=tokens_R,
            offsets=offsets_of(torch.tensor([*map(len, turns)])),
            logprobs=torch.zeros(len(tokens_R)),
            finished=torch.tensor([turn[-1] == self._tokenizer.eos_token_id for turn in turns]),
            texts=tuple(texts),
        )

    def update_weights(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def health(self) -> bool:
        return True

    def close(self) -> None: ...
