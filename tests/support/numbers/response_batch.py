"""A batch of given responses, a token per character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hwgrpo.values import Completions, Prompt, PromptBatch


def of(responses: Sequence[str], ground_truth: str = "18") -> tuple[PromptBatch, Completions]:
    """Return one prompt and its responses."""
    prompt = Prompt(uid="0", text="", token_ids=(1,), ground_truth=ground_truth, columns={}, source="tests")
    tokens = [ord(letter) for text in responses for letter in text]
    completions = Completions(
        prompt_index=torch.zeros(len(responses), dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        offsets=torch.tensor([0, *itertools.accumulate(map(len, responses))]),
        logprobs=torch.zeros(len(tokens)),
        finished=torch.ones(len(responses), dtype=torch.bool),
        texts=tuple(responses),
    )
    return PromptBatch((prompt,)), completions
