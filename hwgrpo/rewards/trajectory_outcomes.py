"""Outcomes of trajectories: the reward `environment`, and trajectories whose environment failed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.values import Completions, PromptBatch

FAILURES = "errors/environment"
"""Key of failed trajectories in `Rewards.failures`."""


class EnvironmentReward:
    """The environment's rewards: the sum over a trajectory's turns, or those of its turns.

    Args:
        turn_rewards: return a list with one reward for each turn. Passed by the trainer.
    """

    def __init__(self, turn_rewards: bool) -> None:
        self._field = "turn_rewards" if turn_rewards else "reward"

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[Any]:
        """Return the rewards of each response, [S]; None where the environment failed.

        Raises:
            ConfigError: a response has no outcome.
        """
        rewards = []
        for index, outcome in zip(completions.prompt_index.tolist(), completions.outcome_of_each, strict=True):
            if not outcome:
                prompt = batch.prompts[index]
                raise ConfigError(
                    f"reward environment: the response to {prompt.place or f'prompt {prompt.uid}'} has no outcome "
                    "of an environment; set rollout.workflow to environment or tools, or use another reward"
                )
            rewards.append(None if outcome.get("failure") else outcome[self._field])
        return rewards


class FailedTrajectories:
    """The trajectories of a batch whose environment failed, and what becomes of them.

    Args:
        batch: G prompts.
        completions: S responses.
        policy: `rollout.agent.on_failure`.

    Raises:
        RewardError: there is one, under the policy `raise`.
    """

    def __init__(self, batch: PromptBatch, completions: Completions, policy: str) -> None:
        reasons = [str(outcome.get("failure") or "") for outcome in completions.outcome_of_each]
        self.failed = torch.tensor([bool(reason) for reason in reasons], dtype=torch.bool)
        """[S] bool: reward functions are not called with these."""
        self.valid = torch.ones_like(self.failed)
        """[S] bool: False for those that the policy takes out."""
        self.failures: dict[str, int] = {}
        self.first_failures: dict[str, str] = {}
        if not self.failed.any():
            return
        first = int(self.failed.nonzero()[0])
        index = completions.prompt_index
        prompt = batch.prompts[int(index[first])]
        where = prompt.place or f"prompt {prompt.uid} of {prompt.source}"
        within = int((index[:first] == index[first]).sum())
        said = f"the environment of {where}, sample {within} of its group, failed: {reasons[first]}"
        if policy == "raise":
            raise RewardError(
                f"{said}; mend it or, to continue without the trajectory, set rollout.agent.on_failure to value, "
                "mask_sample or drop_group"
            )
        self.failures[FAILURES], self.first_failures[FAILURES] = int(self.failed.sum()), said
        if policy == "mask_sample":
            self.valid = ~self.failed
        elif policy == "drop_group":
            self.valid = ~torch.isin(index, index[self.failed])
        else:
            assert policy == "value", policy  # its reward is 0


def last_turns(completions: Completions) -> Completions:
    """Return responses with the text of the policy's last turn as theirs: "" where none followed an observation.

    Responses without an outcome keep their text.
    """
    texts = []
    for text, outcome in zip(completions.texts, completions.outcome_of_each, strict=True):
        last = outcome["messages"][-1:] if outcome else [{"role": "assistant", "content": text}]
        texts.append(last[0]["content"] if last and last[0]["role"] == "assistant" else "")
    return replace(completions, texts=tuple(texts))


class TurnFinder:
    """Finds the turns of responses, whose rewards are those of steps.

    Args:
        needs_lists: whether a reward function has to return the rewards of turns; else one number, which is that of
            the last turn, is enough.
    """

    def __init__(self, needs_lists: bool) -> None:
        self.needs_lists = needs_lists

    def all_token_ends(self, completions: Completions) -> list[list[int]]:
        """Return the index of the last token of each turn of each response."""
        return completions.turn_ends()

    def states(self, completions: Completions, counts: Sequence[int]) -> torch.Tensor:
        """Return a number of the state of each turn, [K] int64; -1 where it is not known.

        Raises:
            RewardError: an outcome has another number of states than its response has turns.
        """
        numbers: list[int] = []
        for outcome, count in zip(completions.outcome_of_each, counts, strict=True):
            states = outcome.get("states") or [None] * count
            if len(states) != count:
                raise RewardError(
                    f"the environment's outcome of a response has {len(states)} states for {count} turns; "
                    "give one for each turn, null where it is not known"
                )
            numbers += map(state_number, states)
        return torch.tensor(numbers, dtype=torch.int64)


def state_number(state: str | None) -> int:
    """Return a number of 63 bits that is the same for equal states, in every process; -1 for None."""
    return (
        -1
        if state is None
        else int.from_bytes(hashlib.sha256(str(state).encode("utf-8", "surrogatepass")).digest()[:8]) >> 1
    )
