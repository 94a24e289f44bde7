"""The step that parity compares: prompts, responses, rewards and log-probs that the vocabulary and a seed determine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hwgrpo.models.rounding import check_ids
from hwgrpo.ragged import offsets_of
from hwgrpo.values import Prompt, PromptBatch, PromptImages, TrainBatch, image_columns, text_axes

PROMPTS = (5, 3, 6, 2, 4, 3, 6, 5)
"""Tokens of each prompt: of different lengths, so that padding, packing and shared prompts all have work; 8 for as many
ranks."""
RESPONSES = ((6, 3, 6), (8, 5, 5), (2, 5, 5), (9, 6, 6), (4, 7, 4), (5, 8, 5), (5, 5, 2), (3, 6, 6))
"""Tokens of the responses to each prompt; sequences have one of two lengths, so that fp64 needs no padding."""
ALIKE = 2
"""Tokens with which the first and the last response to the first prompt begin alike: a layout may share them."""
GREEDY_TOKENS = 6
NEAR, FAR = (0.04, 0.12), (0.35, 0.5)
"""Distances of old log-probs from the model's: within the clip bounds, and beyond them, by more than rounding."""


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
    old_gaps: torch.Tensor
    """[R] fp32: old log-probs minus those of the model."""
    ref_gaps: torch.Tensor
    """[R] fp32: the reference's log-probs minus those of the model."""
    images: tuple[PromptImages | None, ...]
    """Of each prompt."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, PromptImages | None]]:
        """Yield the sequences of each length, unpadded; one that shows images by itself.

        Yields:
            Input ids [B, L]; index of N response tokens in [R]; index of what predicts them in the flattened [B * L];
            images of the only sequence.
        """
        by_length: dict[tuple[int, int | None], list[int]] = {}
        for s, (index, count) in enumerate(zip(self.prompt_index.tolist(), self.offsets.diff().tolist(), strict=True)):
            alone = None if self.images[index] is None else s
            by_length.setdefault((len(self.prompts[index]) + count, alone), []).append(s)
        for (length, _), members in by_length.items():
            ids, places, rows = [], [], []
            for row, s in enumerate(members):
                prompt, place = self.prompts[int(self.prompt_index[s])], torch.arange(*self.offsets[s : s + 2].tolist())
                ids.append(torch.cat([torch.tensor(prompt), self.tokens[place]]))
                places.append(place)
                rows.append(row * length + len(prompt) - 1 + torch.arange(len(place)))
            yield torch.stack(ids), torch.cat(places), torch.cat(rows), self.images[int(self.prompt_index[members[0]])]

    def around(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the old and the reference log-probs [R] fp32 around those of the fp64 step, [R]."""
        return logprobs.float() + self.old_gaps, logprobs.float() + self.ref_gaps

    def of_rank(self, rank: int, ranks: int) -> RankStep:
        """Return the prompts `rank`, `rank + ranks`, ... with their responses."""
        sequences = (self.prompt_index % ranks == rank).nonzero()[:, 0]
        tokens = (self.prompt_index % ranks == rank).repeat_interleave(self.offsets.diff())
        own = FixedStep(
            prompts=self.prompts[rank::ranks],
            prompt_index=self.prompt_index[sequences] // ranks,
            tokens=self.tokens[tokens],
            offsets=offsets_of(self.offsets.diff()[sequences]),
            rewards=self.rewards[sequences],
            old_gaps=self.old_gaps[tokens],
            ref_gaps=self.ref_gaps[tokens],
            images=self.images[rank::ranks],
        )
        return RankStep(own, sequences, tokens)

    @property
    def prompt_batch(self) -> PromptBatch:
        """The prompts as a rollout engine gets them."""
        pairs = zip(self.prompts, self.images, strict=True)
        return PromptBatch(
            tuple(Prompt(f"parity:{i}", "", ids, None, {}, images=of) for i, (ids, of) in enumerate(pairs))
        )

    def train_batch(
        self, advantages: torch.Tensor, old: torch.Tensor | None = None, ref: torch.Tensor | None = None
    ) -> TrainBatch:
        """Return the batch to train on.

        Args:
            advantages: [S].
            old, ref: [R] old and reference log-probs.
        """
        return TrainBatch(
            prompt_tokens=torch.tensor([token for prompt in self.prompts for token in prompt]),
            prompt_offsets=offsets_of(torch.tensor([len(prompt) for prompt in self.prompts])),
            prompt_index=self.prompt_index,
            tokens=self.tokens,
            offsets=self.offsets,
            advantages=advantages,
            logprobs=torch.zeros(len(self.tokens)) if old is None else old,
            old_logprobs=old,
            ref_logprobs=ref,
            **image_columns(self.prompt_batch.prompts),
        )


@dataclass(frozen=True)
class RankStep:
    """A rank's part of a step."""

    step: FixedStep
    sequences: torch.Tensor
    """[S of the rank] int64: its responses among all."""
    tokens: torch.Tensor
    """[R] bool: whether a token is of the rank."""


def make_step(vocabulary: int, seed: int, sample: Prompt | None = None, without: Sequence[int] = ()) -> FixedStep:
    """Return the step of a vocabulary and a seed.

    Args:
        vocabulary: rows of the model's embeddings; its special tokens are avoided where it is large.
        seed: of rewards, log-probs and the order of the tokens.
        sample: a prompt with an image, before every second prompt of the step; None: all are text.
        without: tokens that stand for parts of images.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for group in RESPONSES for length in group])
    total = int(lengths.sum())
    ids = check_ids(vocabulary, sum(PROMPTS) + total, without)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    *prompts, tokens = ids.split([*PROMPTS, total])
    offsets = offsets_of(lengths)
    last = int(offsets[len(RESPONSES[0]) - 1])
    tokens[last : last + ALIKE] = tokens[:ALIKE]
    ends = offsets[1 :: len(RESPONSES[0])]
    tokens[ends - 1] = tokens[ends - 2]  # of a token that repeats, a model may be sure

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(total, generator=generator)

    def either(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(total, generator=generator) < 0.5, first, second)

    gaps = either(uniform(*NEAR), uniform(*FAR))
    shown = [None if sample is None or i % 2 else _shown(sample, i, len(each)) for i, each in enumerate(prompts)]
    begun = [() if images is None or sample is None else sample.token_ids for images in shown]
    return FixedStep(
        prompts=tuple((*before, *each.tolist()) for before, each in zip(begun, prompts, strict=True)),
        images=tuple(shown),
        prompt_index=torch.tensor([i for i, group in enumerate(RESPONSES) for _ in group]),
        tokens=tokens,
        offsets=offsets,
        rewards=torch.rand(len(lengths), generator=generator, dtype=torch.float64),
        old_gaps=either(gaps, -gaps),
        ref_gaps=uniform(-FAR[0], FAR[0]),
    )


def _shown(sample: Prompt, number: int, further: int) -> PromptImages:
    """Return the sample's image with its pixels in another order, for a prompt that has `further` tokens after it."""
    images = sample.images
    assert images is not None
    pixels, axes = images.inputs["pixel_values"].roll(number, 0), images.axes
    if axes is not None:
        axes = torch.cat([axes, text_axes(further) + axes.max() + 1])
    inputs = {**images.inputs, "pixel_values": pixels}
    return replace(images, inputs=inputs, digest=f"{images.digest} {number}", axes=axes)
