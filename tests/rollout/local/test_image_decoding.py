"""Sampling after images: log-probs are those that plain transformers computes of each sequence alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.models.vision import image_encoder
from hwgrpo.rollout.local import image_check
from hwgrpo.rollout.local.decode_rows import ModelRows, tokens_of
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Completions, Prompt, PromptBatch, PromptImages, Sampling
from tests.support.models.vision_families import VISION_FAMILIES, model_of, reference_logits, text

CPU = torch.device("cpu")
TOKENIZER = character_tokenizer("")
FAMILIES = ("Qwen2-VL", "Qwen3-VL", "Qwen3.5", "Gemma 3", "InternVL", "SmolVLM")
"""One of each kind of positions and image; Qwen3.5's states are recurrent."""


def prompts(family: str) -> list[Prompt]:
    """Return two prompts with the same tokens and other images, one with two images, and one of text."""
    of, draw = VISION_FAMILIES[family], torch.Generator().manual_seed(3)
    ids, images = of.prompt(1)
    other = {name: tensor.flip(0) if tensor.is_floating_point() else tensor for name, tensor in images.inputs.items()}
    twin = replace(images, inputs=other, digest="flipped")
    made = [(ids, images), (ids, twin), of.prompt(2, images=2), (text(draw, 4, 6), None)]
    return [Prompt(str(i), "", tuple(tokens), None, {}, images=each) for i, (tokens, each) in enumerate(made)]


def engine_of(family: str, **options: int) -> LocalEngine:
    slots = options.get("slots", 6)
    return LocalEngine(
        model_of(family), TOKENIZER, device=CPU, compute_dtype=torch.float32, max_sequences=slots, longest=100
    )


def reference(family: str, prompt: Prompt, response: Sequence[int]) -> torch.Tensor:
    """Return the log-probs of a response by the model's own forward."""
    model, of = model_of(family), VISION_FAMILIES[family]
    logits = reference_logits(model, of, prompt.token_ids, response, prompt.images)[len(prompt.token_ids) - 1 : -1]
    logits = ban(logits, placeholder_ids(model.config))
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logprobs_are_those_of_plain_transformers(family: str):
    batch, banned = PromptBatch(tuple(prompts(family))), placeholder_ids(model_of(family).config)
    sampled = engine_of(family).generate(batch, Sampling(3, 9, seed=1))
    for number, response in zip(sampled.prompt_index.tolist(), sampled.split([1] * len(sampled)), strict=True):
        tokens = response.tokens.tolist()
        assert not {*tokens} & {*banned}
        expected = reference(family, batch.prompts[number], tokens)
        assert float((response.logprobs - expected).abs().max()) < 1e-5
    twins = [sampled.split([3] * 4)[number].tokens for number in (0, 1)]
    assert len(twins[0]) != len(twins[1]) or bool((twins[0] != twins[1]).any())


def test_tokens_that_stand_for_images_are_never_sampled_and_have_no_probability():
    model = model_of("Qwen2-VL")
    banned = placeholder_ids(model.config)
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[banned] = 30 * weight[5]  # else they would hardly ever be drawn
        sampled = engine_of("Qwen2-VL").generate(PromptBatch(tuple(prompts("Qwen2-VL"))), Sampling(4, 9, seed=2))
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert not {*sampled.tokens.tolist()} & {*banned}


def test_a_group_encodes_its_images_once_and_so_do_later_prompts_with_the_same():
    batch = PromptBatch(tuple(prompts("Qwen2-VL")))
    engine = engine_of("Qwen2-VL")
    encoder = image_encoder(model_of("Qwen2-VL"))
    assert encoder is not None
    model_of("Qwen2-VL").model.visual.requires_grad_(False)
    try:
        before = encoder.encoded
        engine.generate(batch, Sampling(4, 5, seed=1))
        engine.generate(batch, Sampling(4, 5, seed=2))
    finally:
        model_of("Qwen2-VL").model.visual.requires_grad_(True)
    assert encoder.encoded - before == 3


class Looks:
    """A workflow of two turns: after the first one the model sees a picture."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.made: list[Trajectory] = []

    async def __call__(self, prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(own: Sampler) -> Trajectory:
            trajectory = own.trajectory()
            await own.sample(trajectory, max_tokens=3)
            ids, images = VISION_FAMILIES[self.family].prompt(30 + len(self.made))
            self.made.append(trajectory)
            trajectory.observe(ids, "", images)
            await own.sample(trajectory, max_tokens=4)
            return trajectory

        return await sampler.gather(one)


@pytest.mark.parametrize("family", ["Qwen2-VL", "InternVL"])
@torch.no_grad()
def test_a_turn_after_an_observed_image_is_sampled_as_the_model_itself_would(family: str):
    batch, workflow = PromptBatch(tuple(prompts(family)[1:])), Looks(family)
    engine = WorkflowEngine(engine_of(family), workflow, "looks", TOKENIZER, 60.0)
    sampled = engine.generate(batch, Sampling(2, 60, seed=4))
    assert len(sampled.seen) == len(sampled) == 6
    for number, one in zip(sampled.prompt_index.tolist(), sampled.split([1] * 6), strict=True):
        prompt, mask = batch.prompts[number], one.loss_mask
        assert mask is not None
        parts = [each for each in (prompt.images, *one.seen[0]) if each is not None]
        images = PromptImages({n: torch.cat([each.inputs[n] for each in parts]) for n in parts[0].inputs}, "", 0)
        expected = reference(family, replace(prompt, images=images), one.tokens.tolist())
        assert float((one.logprobs - expected)[mask].abs().max()) < 1e-5
    stored, known = sampled.to_tensors("a.")
    again = Completions.from_tensors("a.", stored, known)
    assert [[each.digest for each in seen] for seen in again.seen] == [
        [e.digest for e in seen] for seen in sampled.seen
    ]
    for mine, theirs in zip(again.seen, sampled.seen, strict=True):
        assert all(torch.equal(mine[0].inputs[name], tensor) for name, tensor in theirs[0].inputs.items())


def test_an_observed_image_without_room_ends_the_trajectory_whole():
    ids, images = VISION_FAMILIES["Qwen2-VL"].prompt(1)
    trajectory = Trajectory(prompts("Qwen2-VL")[3], len(ids) - 1)
    trajectory.observe(ids, "", images)
    assert trajectory.truncated
    assert trajectory.segments == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_startup_check_passes(family: str):
    ids, images = VISION_FAMILIES[family].prompt(1)
    sample = Prompt("", "", tuple(ids), None, {}, images=images)
    for supports_padding in (True, False):
        image_check.check_images(model_of(family), CPU, sample, supports_padding=supports_padding)


def test_the_startup_check_finds_positions_that_are_not_the_models():
    ids, images = VISION_FAMILIES["Qwen2-VL"].prompt(1)
    assert images.axes is not None
    wrong = replace(images, axes=images.axes.roll(1, dims=1))
    with pytest.raises(ConfigError, match="after a prompt with an image, logits differ by"):
        image_check.check_images(
            model_of("Qwen2-VL"), CPU, Prompt("", "", tuple(ids), None, {}, images=wrong), supports_padding=True
        )


def test_a_prompt_whose_images_are_lost_is_refused():
    prompt = prompts("Qwen2-VL")[0]
    rows = ModelRows(model_of("Qwen2-VL"), CPU)
    with torch.no_grad(), pytest.raises(DataError, match="stand for parts of images"):
        rows.prefill([prompt.token_ids])
    with torch.no_grad():
        rows.prefill([tokens_of(prompt)])
