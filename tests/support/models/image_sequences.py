"""Responses to prompts with images, some of which observe an image, as batches and by plain transformers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.ragged import offsets_of
from hwgrpo.values import Prompt, PromptImages, TrainBatch, image_columns, text_axes
from tests.support.models.vision_families import VISION_FAMILIES, reference_logits, text


class Sequences:
    """Responses to two prompts with images and one of text; some observe an image of their own.

    Args:
        family: of the model.
        observes: whether two do.
        prompts: numbers of the prompts that are taken, of 0 to 2; the last is of text.
    """

    def __init__(self, family: str, *, observes: bool, prompts: Collection[int] = (0, 1, 2)) -> None:
        self.family, draw = family, torch.Generator().manual_seed(5)
        of = VISION_FAMILIES[family]
        made = [of.prompt(1), of.prompt(2, images=2), (text(draw, 4, 6), None)]
        self.prompts = [Prompt(str(i), "", tuple(ids), None, {}, images=each) for i, (ids, each) in enumerate(made)]
        self.index = [0, 0, 0, 1, 1, 2, 2]
        self.responses = [text(draw, 2, 7) for _ in self.index]
        self.responses[1] = [*self.responses[0][:2], *self.responses[1]]  # two begin alike
        self.seen: list[tuple[PromptImages, ...]] = [()] * len(self.index)
        self.masks = [[True] * len(response) for response in self.responses]
        self.shifts = [torch.zeros(len(response), 3, dtype=torch.int64) for response in self.responses]
        if observes:
            for sequence in (1, 6):
                self.observe(sequence, *of.prompt(10 + sequence))
        kept = [sequence for sequence, prompt in enumerate(self.index) if prompt in prompts]
        for name in ("responses", "seen", "masks", "shifts"):
            setattr(self, name, [getattr(self, name)[sequence] for sequence in kept])
        number = {prompt: i for i, prompt in enumerate(sorted(prompts))}
        self.index = [number[self.index[sequence]] for sequence in kept]
        self.prompts = [self.prompts[prompt] for prompt in number]

    def observe(self, sequence: int, ids: list[int], images: PromptImages) -> None:
        before, after = self.responses[sequence], [7, 8, 9]
        self.responses[sequence] = [*before, *ids, *after]
        self.masks[sequence] = [True] * len(before) + [False] * len(ids) + [True] * len(after)
        self.seen[sequence] = (images,)
        own = text_axes(len(ids)) if images.axes is None else images.axes
        shift = int(own.max()) + 1 - len(ids)
        each = [torch.zeros(len(before), 3), own - text_axes(len(ids)), torch.full((len(after), 3), shift)]
        self.shifts[sequence] = torch.cat([part.long() for part in each])

    def batch(self) -> TrainBatch:
        tokens = [token for response in self.responses for token in response]
        observes = any(self.seen)
        axes = VISION_FAMILIES[self.family].prompt(1)[1].axes is not None
        return TrainBatch(
            prompt_tokens=torch.tensor([token for prompt in self.prompts for token in prompt.token_ids]),
            prompt_offsets=offsets_of(torch.tensor([len(prompt.token_ids) for prompt in self.prompts])),
            prompt_index=torch.tensor(self.index),
            tokens=torch.tensor(tokens),
            offsets=offsets_of(torch.tensor([len(response) for response in self.responses])),
            advantages=torch.ones(len(self.index)),
            logprobs=torch.zeros(len(tokens)),
            loss_mask=torch.tensor([each for mask in self.masks for each in mask]) if observes else None,
            seen=tuple(self.seen) if observes else (),
            shifts=torch.cat(self.shifts) if observes and axes else None,
            **image_columns(self.prompts, shifted=observes and axes),
        )

    def reference(self, model: torch.nn.Module) -> torch.Tensor:
        """Return [R] the log-prob of each token, by the model's own forward on each sequence alone."""
        of, banned = VISION_FAMILIES[self.family], placeholder_ids(model.config)
        every = []
        for sequence, prompt in enumerate(self.index):
            images = [each for each in (self.prompts[prompt].images, *self.seen[sequence]) if each is not None]
            joined = None
            if images:
                names = images[0].inputs
                joined = replace(images[0], inputs={n: torch.cat([each.inputs[n] for each in images]) for n in names})
            ids, response = self.prompts[prompt].token_ids, self.responses[sequence]
            logits = ban(reference_logits(model, of, ids, response, joined), banned)[len(ids) - 1 : -1]
            every.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
        return torch.cat(every)
