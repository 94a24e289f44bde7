"""The step that parity compares: prompts, responses, rewards and log-probs that the vocabulary and a seed determine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from hwgrpo.models.rounding import check_ids
from hwgrpo.ragged import offsets_of
from hwgrpo.values import Prompt, PromptBatch

PROMPTS = (5, 3)
"""Tokens of each prompt: of different lengths, so that padding, packing and shared prompts all have work."""
RESPONSES = ((6, 2, 4), (3, 7, 5))
"""Tokens of the responses to each prompt."""
GREEDY_TOKENS = 6
NOISE = 0.2
"""Standard deviation of the old and reference log-probs around those of the model: a third of the ratios clip."""


@dataclass(frozen=True)
class FixedStep:
    """A step of G prompts and S responses with R tokens in total."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    prompt_index: torch.Tensor
    """[S] int64."""
    tokens: torch.Tensor
    """[R] int64."""
    offsets: torch.Tensor
    """[S + 1] int64."""
    rewards: torch.Tensor
    """[S] fp64."""
    old_noise: torch.Tensor
    """[R] fp32: old log-probs minus those of the model."""
    ref_noise: torch.Tensor
    """[R] fp32: the reference's log-probs minus those of the model."""

    def __iter__(self) -> Iterator[tuple[slice, tuple[int, ...], torch.Tensor]]:
        """Yield of each response its place in [R], its prompt's ids, and all ids of its sequence."""
        for index, (start, end) in zip(self.prompt_index.tolist(), pairwise(self.offsets.tolist()), strict=True):
            prompt = self.prompts[index]
            yield slice(start, end), prompt, torch.cat([torch.tensor(prompt), self.tokens[start:end]])

    def given_logprobs(self, around: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the old and the reference log-probs [R] fp32 around those of the fp64 step."""
        return around.float() + self.old_noise, around.float() + self.ref_noise

    @property
    def batch(self) -> PromptBatch:
        """The prompts as a rollout engine gets them."""
        return PromptBatch(tuple(Prompt(f"parity:{i}", "", ids, None, {}) for i, ids in enumerate(self.prompts)))


def make_step(vocabulary: int, seed: int) -> FixedStep:
    """Return the step of a vocabulary and a seed.

    Args:
        vocabulary: rows of the model's embeddings; its special tokens are avoided where it is large.
        seed: of rewards, log-probs and the order of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for group in RESPONSES for length in group])
    total = int(lengths.sum())
    ids = check_ids(vocabulary, sum(PROMPTS) + total)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    *prompts, tokens = ids.split([*PROMPTS, total])
    return FixedStep(
        prompts=tuple(tuple(each.tolist()) for each in prompts),
        prompt_index=torch.tensor([i for i, group in enumerate(RESPONSES) for _ in group]),
        tokens=tokens,
        offsets=offsets_of(lengths),
        rewards=torch.rand(len(lengths), generator=generator, dtype=torch.float64),
        old_noise=NOISE * torch.randn(total, generator=generator),
        ref_noise=NOISE * torch.randn(total, generator=generator),
    )
