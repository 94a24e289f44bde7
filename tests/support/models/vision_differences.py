"""How far images encoded once, layouts and rollouts of vision-language families are from plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hwgrpo.catalog import LAYOUTS
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.vision import ImageEncoder
from hwgrpo.ragged import offsets_of
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling, TrainBatch, image_columns
from tests.support.models.families import TEMPERATURE, TOKENIZER, largest_gap, run_layout, run_settings
from tests.support.models.steps import CPU, gradients, reference_gradients, updater
from tests.support.models.vision_families import (
    VISION_FAMILIES,
    Row,
    VisionFamily,
    encoded_logits,
    exact_copy,
    frozen,
    model_of,
    reference_logits,
    reference_logprobs,
    text,
)


def row_of(name: str, seed: int, images: int) -> Row:
    """Return a prompt of a family, with so many images or of text alone, and a response."""
    draw = torch.Generator().manual_seed(100 + seed)
    ids, made = VISION_FAMILIES[name].prompt(seed, images) if images else (text(draw, 3, 9), None)
    return Row(ids, made, text(draw, 3, 8))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest magnitude, which is taken for at least 1."""
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@dataclass(frozen=True)
class ForwardDifferences:
    """How far logits and gradients of images that are encoded once are from those of the model's own forward.

    Logits by `distance`.
    """

    alone: float
    """A sequence with an image."""
    two_images: float
    padded: float
    """Rows of text, of one and of two images, padded on the left."""
    gradient: float
    """Of three responses to one prompt, in fp64, by the magnitude of a gradient's summands."""
    encoded: int
    """Prompts that were encoded, of the three that have images; frozen weights encode each once."""


def forward_differences(name: str) -> ForwardDifferences:
    """Compare forwards with explicit positions and images encoded once with the model's own, which reads pixels."""
    family, model = VISION_FAMILIES[name], frozen(name)
    encoder = ImageEncoder(model)
    rows = [row_of(name, 1, 1), row_of(name, 2, 2), row_of(name, 3, 0), row_of(name, 4, 1)]
    rows += [Row(rows[1].ids, rows[1].images, [7, 8])]

    def apart(batch: Sequence[Row]) -> float:
        with torch.no_grad():
            expected = [reference_logits(model, family, row.ids, row.response, row.images) for row in batch]
            return max(map(distance, encoded_logits(model, encoder, batch), expected))

    return ForwardDifferences(
        alone=apart(rows[:1]),
        two_images=apart(rows[1:2]),
        padded=apart(rows),
        gradient=_gradient_difference(name, rows[1]),
        encoded=encoder.encoded,
    )


def _gradient_difference(name: str, row: Row) -> float:
    family, ours, theirs = VISION_FAMILIES[name], exact_copy(model_of(name)), exact_copy(model_of(name))
    draw = torch.Generator().manual_seed(9)
    rows = [replace(row, response=text(draw, 3, 8)) for _ in range(3)]
    encoder = ImageEncoder(ours)
    loss = expected = torch.zeros((), dtype=torch.float64)
    for each, logits in zip(rows, encoded_logits(ours, encoder, rows), strict=True):
        weight = torch.randn(len(each.response), generator=draw, dtype=torch.float64)
        chosen = torch.tensor(each.response)[:, None]
        logprobs = logits[len(each.ids) - 1 : -1].log_softmax(-1).gather(1, chosen)[:, 0]
        loss = loss + (logprobs * weight).sum()
        own = reference_logprobs(theirs, family, each.ids, each.response, each.images)
        expected = expected + (own * weight).sum()
    loss.backward()
    expected.backward()
    assert encoder.encoded == 1
    found, true = ({key: p.grad for key, p in each.named_parameters() if p.grad is not None} for each in (ours, theirs))
    assert found.keys() == true.keys()
    return largest_gap(found, true)


@dataclass(frozen=True)
class RunDifferences:
    """How far a step and a rollout of a run are from plain transformers."""

    layout: str
    """The one that auto selects."""
    layouts: dict[str, tuple[float, float]]
    """Name -> differences of log-probs (see `distance`) and gradients, of the layouts that the start check accepts."""
    refused: dict[str, str]
    """Name -> why the start check refuses it."""
    decode: str
    """How the local engine decodes."""
    rollout: float
    """Of the sampled tokens' log-probs."""


def run_differences(name: str, folder: Path) -> RunDifferences:
    """Compare a training step in each layout, and a rollout, of a family's saved and loaded model.

    Args:
        name: of the family.
        folder: an empty one, for the model.
    """
    family = VISION_FAMILIES[name]
    model_of(name).save_pretrained(folder)
    model = load_model(run_settings(folder).model, attention="sdpa")
    reference = model_of(name)
    update = updater(model, f"rollout.temperature={TEMPERATURE}")
    prompts = [_prompt(str(i), row_of(name, i + 1, images)) for i, images in enumerate((1, 0, 2))]
    images = update.policy.images
    assert images is not None
    images.sample = _prompt("sample", row_of(name, 9, 1))
    batch = _batch(prompts)
    expected = _logprobs(reference, family, prompts, batch)
    chosen, _ = run_layout(update, folder, "auto", "sdpa")
    _, expected_gradient = reference_gradients(_PlainModel(reference, family, prompts), update.config, batch)
    expected_gradient = {key.removeprefix("model."): value for key, value in expected_gradient.items()}
    layouts, refused = {}, {}
    for layout_name in LAYOUTS.names():
        try:
            layout, note = run_layout(update, folder, layout_name, "sdpa")
        except ConfigError as error:
            refused[layout_name] = str(error)
            continue
        if layout.name != layout_name:
            refused[layout_name] = note or ""
            continue
        update.layout = replace(layout, dense_up_to=0)  # these rows are short
        _, found, _ = gradients(update, batch)
        layouts[layout_name] = distance(update.score(batch), expected), largest_gap(found, expected_gradient)
    model.set_attn_implementation("sdpa")
    engine = LocalEngine(
        model, TOKENIZER, device=CPU, compute_dtype=torch.float32, max_sequences=64, image_sample=images.sample
    )
    done = engine.generate(PromptBatch(tuple(prompts)), Sampling(2, 8, temperature=TEMPERATURE))
    rollout = distance(done.logprobs, _logprobs(reference, family, prompts, done))
    return RunDifferences(chosen.name, layouts, refused, engine.decode_path, rollout)


def _prompt(uid: str, row: Row) -> Prompt:
    return Prompt(uid, "", tuple(row.ids), None, {}, images=row.images)


def _batch(prompts: Sequence[Prompt], n: int = 3) -> TrainBatch:
    """Return n responses to each prompt, with random advantages."""
    draw = torch.Generator().manual_seed(11)
    responses = [text(draw, 1, 8) for _ in range(n * len(prompts))]
    total = sum(map(len, responses))
    return TrainBatch(
        prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        prompt_offsets=offsets_of(torch.tensor([len(prompt.token_ids) for prompt in prompts])),
        **image_columns(prompts),
        prompt_index=torch.arange(len(prompts)).repeat_interleave(n),
        tokens=torch.tensor([token for response in responses for token in response]),
        offsets=offsets_of(torch.tensor([len(response) for response in responses])),
        advantages=torch.randn(len(responses), generator=draw),
        logprobs=torch.randn(total, generator=draw) * 0.2 - 3,
        old_logprobs=torch.randn(total, generator=draw) * 0.3 - 3,
    )


@torch.no_grad()
def _logprobs(model: Any, family: VisionFamily, prompts: Sequence[Prompt], batch: Any) -> torch.Tensor:
    """Return the log-prob [R] of each token of a batch's responses, of a distribution without placeholders."""
    rows = []
    for s, tokens in enumerate(batch.token_lists()):
        prompt = prompts[int(batch.prompt_index[s])]
        logits = reference_logits(model, family, prompt.token_ids, tokens, prompt.images)
        logits = ban(logits[len(prompt.token_ids) - 1 : -1], placeholder_ids(model.config)) / TEMPERATURE
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(rows)


class _PlainModel(nn.Module):
    """A model that finds the images of a prompt by its tokens, and reads them itself."""

    def __init__(self, model: Any, family: VisionFamily, prompts: Sequence[Prompt]) -> None:
        super().__init__()
        self.model = exact_copy(model)
        self._family, self._prompts = family, prompts

    def forward(self, input_ids: torch.Tensor) -> Any:
        ids = input_ids[0].tolist()
        [prompt] = [each for each in self._prompts if tuple(ids[: len(each.token_ids)]) == each.token_ids]
        logits = reference_logits(self.model, self._family, ids, [], prompt.images)
        return SimpleNamespace(logits=ban(logits, placeholder_ids(self.model.config))[None])
