"""Tests the reward functions on one row before training, to detect a broken one at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hwgrpo.agents.action import StepResult
from hwgrpo.agents.agent_rows import AgentRows
from hwgrpo.agents.episode import Record
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.ragged import offsets_of
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.ground_truths import own_answer
from hwgrpo.values import Completions, PromptBatch

MADE_UP = "a made-up response"
SHOWN = 40
"""Longest shown ground truth, in characters."""


def try_rewards(rewards: RewardPipeline, dataset: PromptDataset, tokenizer: Any) -> list[str]:
    """Score two made-up responses to the first prompt: its ground truth and an empty text.

    Args:
        rewards: the reward functions.
        dataset: the training prompts.
        tokenizer: tokenizes the responses, because functions may read tokens.

    Returns:
        A line for each function, and one with the tested row.

    Raises:
        ConfigError: a function failed in a way that would stop the run.
    """
    prompt = dataset.prompt(0, 0)
    answer = own_answer(prompt.ground_truth) or None
    kind = "a made-up response" if answer is None else "the answer itself"
    batch, completions = PromptBatch((prompt,)), _completions((answer or MADE_UP, ""), tokenizer)
    if isinstance(dataset.rows, AgentRows):
        environment = str(prompt.columns.get("environment") or "")
        completions = replace(completions, outcomes=tuple(_outcome(environment, text) for text in completions.texts))
    tried = f"{prompt.place}" + (f", whose answer is {_shown(answer)}" if answer else "")
    try:
        scored = rewards.score(batch, completions, 1)
    except RewardError as error:
        raise ConfigError(f"{error} (tried with {kind}, sample 0, and an empty response, sample 1)") from error
    lines = []
    for number, name in enumerate(rewards.names):
        if any(failure.partition("/")[2] == name for failure in scored.failures):
            lines.append(f"{name} fails, which would not stop the run: {_why(rewards, number, batch, completions)}")
        else:
            right, empty = scored.per_function[name].tolist()
            lines.append(f"{name}: {right:g} for {kind}, {empty:g} for an empty response")
    return [*lines, f"tried on {tried}"]


def _completions(texts: tuple[str, ...], tokenizer: Any) -> Completions:
    rows = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    tokens = torch.tensor([token for row in rows for token in row])
    return Completions(
        prompt_index=torch.zeros(len(texts), dtype=torch.int64),
        tokens=tokens,
        offsets=offsets_of(torch.tensor([*map(len, rows)])),
        logprobs=torch.zeros(len(tokens)),
        finished=torch.ones(len(texts), dtype=torch.bool),
        texts=texts,
    )


def _outcome(environment: str, text: str) -> dict[str, Any]:
    """Return the outcome of a trajectory of one turn without reward."""
    record = Record(environment)
    record.messages.append({"role": "assistant", "content": text})
    record.add(StepResult("", done=True), None)
    record.stop = "done"
    return record.outcome()


def _why(rewards: RewardPipeline, number: int, batch: PromptBatch, completions: Completions) -> str:
    """Return the error of a function that its settings ignore."""
    try:
        rewards.strict(number).score(batch, completions, 1)
    except RewardError as error:
        return str(error).partition("; mend it")[0]
    return "not every time"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
