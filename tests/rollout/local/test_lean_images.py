"""The lean decode step of models that read images: its tokens are those of their own forward."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from hwgrpo.models.placeholders import BANNED, ban, placeholder_ids
from hwgrpo.models.vision import image_encoder
from hwgrpo.rollout.local import lean_step, shared_prefix_attention
from hwgrpo.rollout.local.architectures import TEXT_MODELS, VISION_MODELS, predict_fallback, unsupported_reason
from hwgrpo.rollout.local.continued_prefill import prefill_after
from hwgrpo.rollout.local.decode_graph import RecordedRows
from hwgrpo.rollout.local.decode_rows import ModelRows, digests_of, shift_of, tokens_of
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.rollout.decoders import CPU, TOKENIZER, both_ways, engine_of
from tests.support.devices.recorder import Recorder
from tests.support.models.vision_families import TEXT, VISION_FAMILIES, frozen, model_of, reference_logits, text
from tests.support.numbers.decode_kernels_on_cpu import selected
from tests.support.numbers.rounding import assert_values_close

THREE_AXES = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL")
LEAN = (
    *THREE_AXES, "InternVL", "InternVL, Qwen3", "Mistral 3", "SmolVLM", "Idefics3", "LLaVA-OneVision", "LLaVA",
    "LLaVA, Pixtral",
)  # fmt: skip
SAMPLED = Sampling(3, 14, seed=3, temperature=0.8)
SETTINGS = [Sampling(1, 14, greedy=True), SAMPLED]


@cache
def lean_model(name: str) -> Any:
    """Return a family's model; InternVL's later ones have another text model."""
    if name != "InternVL, Qwen3":
        return model_of(name)
    config = VISION_FAMILIES["InternVL"].config()
    config.text_config = transformers.Qwen3Config(**TEXT, head_dim=8)
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@cache
def prompts_of(name: str) -> PromptBatch:
    """Return two prompts with the same tokens and other images, one with three images, and two of text."""
    of, draw = VISION_FAMILIES[name.partition(", Qwen3")[0]], torch.Generator().manual_seed(3)
    ids, images = of.prompt(1)
    other = {key: tensor.flip(0) if tensor.is_floating_point() else tensor for key, tensor in images.inputs.items()}
    twin = replace(images, inputs=other, digest="flipped")
    made = [(ids, images), (text(draw, 9, 9), None), of.prompt(2, images=3), (ids, twin), (text(draw, 3, 3), None)]
    return PromptBatch(
        tuple(Prompt(str(i), "", tuple(tokens), None, {}, images=each) for i, (tokens, each) in enumerate(made))
    )


def sample_of(name: str) -> Prompt:
    return prompts_of(name).prompts[2]


def by_the_model(model: Any, batch: PromptBatch, sampling: Sampling, monkeypatch: pytest.MonkeyPatch, **more: Any):
    with monkeypatch.context() as patch:
        patch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "it is disabled")
        engine = engine_of(model, **more)
        assert engine.decode_path == "model"
        return engine.generate(batch, sampling)


def assert_same(found: Any, expected: Any) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert_values_close(found.logprobs, expected.logprobs)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix_attention, "FIRST_CAPACITY", 4)


def test_every_model_of_the_table_is_tested_here():
    def below(kind: type) -> str:
        return f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models.")

    assert {below(type(lean_model(name))) for name in LEAN} == VISION_MODELS
    assert {below(type(lean_model(name).get_decoder())) for name in LEAN} == TEXT_MODELS.keys()


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_what_decodes_is_known_of_the_configuration_alone(name):
    model = model_of(name)
    assert (unsupported_reason(model, 100) is None) == (name in LEAN)
    assert predict_fallback(model.config, 100) == unsupported_reason(model, 100)


def test_a_text_model_that_is_not_supported_and_its_window_are_named():
    config = VISION_FAMILIES["InternVL"].config()
    config.text_config = transformers.Phi3Config(**{**TEXT, "pad_token_id": 0})
    assert predict_fallback(config, 20) == "Phi3Model is not one of the supported architectures"
    config.text_config = transformers.MistralConfig(**TEXT, sliding_window=16)
    assert predict_fallback(config, 16) is None
    assert predict_fallback(config, 17) == "a sequence can be 17 tokens long, its attention sees 16"


@pytest.mark.parametrize("name", THREE_AXES)
def test_positions_that_are_equal_on_all_axes_rotate_as_one_position(name):
    model = model_of(name)
    rotary, places = model.get_decoder().rotary_emb, torch.arange(300)
    frequencies = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    assert_values_close(rotary.inv_freq, frequencies)
    angles = torch.outer(places.double(), rotary.inv_freq.double()).repeat(1, 2)
    like = torch.zeros(1)
    # [1, L]: as the lean step asks; [3, 1, L]: as a forward does
    for equal in (places[None], places.expand(3, 1, -1)):
        for found, expected in zip(rotary(like, equal), (angles.cos(), angles.sin()), strict=True):
            assert float((found[0].double() - expected).abs().max()) < 300 * torch.finfo(torch.float32).eps
    other = torch.stack([places, places + 100, places + 200])[:, None]
    assert float((rotary(like, other)[0][0] - angles.cos()).abs().max()) > 0.1


@pytest.mark.parametrize("name", LEAN)
def test_the_engine_samples_the_tokens_of_the_models_own_forward(name, monkeypatch):
    """With fewer slots than responses, so that slots take responses to other prompts, with and without images."""
    model, batch = lean_model(name), prompts_of(name)
    engine = engine_of(model, max_sequences=4, longest=100, image_sample=sample_of(name))
    assert (engine.decode_path, engine.decode_reason, engine.notes) == ("lean", "", ())
    for sampling in SETTINGS:
        assert_same(engine.generate(batch, sampling), by_the_model(model, batch, sampling, monkeypatch))


def unbanned(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return logits for a comparison in shares of the largest, after a look at those of placeholders."""
    banned = placeholder_ids(model.config)
    assert (logits[:, banned] == BANNED).all()
    return ban(logits, banned, 0.0)


def refilled(rows: Any, prompts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Yield the logits of rows that begin anew in the places of others, are moved and dropped."""
    tokens = torch.tensor([7, 8, 9, 10])
    image, of_text, images, twin = rows.prefill(prompts[:4])[0]
    rows.arrange(~np.array([of_text, image, image, twin]), np.array([2, 9, 6, 9]))
    for step in range(5):  # the first row overwrites its second token
        yield rows.step(tokens + step)
    rows.arrange(np.array([~images, 1, 2, ~of_text]), np.array([3, 4, 1, 12]))
    for step in range(6):
        yield rows.step(tokens + 10 + step)
    [last] = rows.prefill(prompts[4:])[0]
    rows.free([of_text])
    rows.arrange(np.array([3, ~last, 0, ~twin]), np.array([6, 6, 1, 7]))
    for step in range(6):
        yield rows.step(tokens + 20 + step)


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "Mistral 3"])
@torch.no_grad()
def test_rows_that_begin_anew_have_their_own_positions(name):
    """Compared with the model's own forward, which refills nothing, for each response that begins."""
    model, prompts = lean_model(name), [tokens_of(prompt) for prompt in prompts_of(name).prompts]

    def alone(prompt: int, first: int, steps: int) -> torch.Tensor:
        rows = ModelRows(model, CPU)
        rows.arrange(~np.array(rows.prefill([prompts[prompt]])[0]), np.array([steps]))
        return unbanned(model, torch.cat([rows.step(torch.tensor([first + step])) for step in range(steps)]))

    logits = [unbanned(model, each) for each in refilled(LeanRows(model, CPU), prompts)]
    assert_values_close(torch.stack([each[1] for each in logits[:5]]), alone(0, 8, 5))
    assert_values_close(torch.stack([each[3] for each in logits[:5]]), alone(3, 10, 5))
    assert_values_close(torch.stack([each[0] for each in logits[5:8]]), alone(2, 17, 3))
    assert_values_close(torch.stack([each[3] for each in logits[5:11]]), alone(1, 20, 6))
    assert_values_close(torch.stack([each[1] for each in logits[11:]]), alone(4, 28, 6))
    assert_values_close(torch.stack([each[3] for each in logits[11:]]), alone(3, 30, 6))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed"])
@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "InternVL"])
@torch.no_grad()
def test_recordings_and_kernels_change_no_logits(name, fixed, kernels):
    model, prompts, recorder = lean_model(name), [tokens_of(each) for each in prompts_of(name).prompts], Recorder()
    expected = [unbanned(model, each) for each in refilled(LeanRows(model, CPU), prompts)]

    def found() -> list[torch.Tensor]:
        rows = LeanRows(model, CPU, fixed=fixed)
        return [
            unbanned(model, each)
            for each in refilled(RecordedRows(rows, recorder, worth_recording=1) if fixed else rows, prompts)
        ]

    if kernels:
        with selected() as calls:
            both = zip(found(), expected, strict=True)
        assert calls["decode_attention"] > 0
    else:
        both = zip(found(), expected, strict=True)
    for one, other in both:
        assert_values_close(one, other)
    assert (sum(each.replays for each in recorder.made) > 0) == fixed


@pytest.mark.parametrize("name", LEAN)
def test_decoded_graphs_sample_the_same(name, monkeypatch):
    model, batch = lean_model(name), prompts_of(name)
    engine = engine_of(model, max_sequences=4, recorder=Recorder(), image_sample=sample_of(name))
    assert engine.decode_path == "graph"
    assert_same(engine.generate(batch, SAMPLED), by_the_model(model, batch, SAMPLED, monkeypatch))


@pytest.mark.parametrize("name", THREE_AXES)
@torch.no_grad()
def test_a_prompt_may_end_with_an_image(name):
    model, prompt, images = model_of(name), sample_of(name), sample_of(name).images
    assert images is not None
    assert images.axes is not None
    end = len(prompt.token_ids) - prompt.token_ids[::-1].index(images.token_id)
    cut = replace(prompt, token_ids=prompt.token_ids[:end], images=replace(images, axes=images.axes[:end]))
    both = both_ways(model, [tokens_of(cut)], ([0], (4, None)), 20)
    response = [step % len(TOKENIZER) for step in range(4)]
    own = reference_logits(model, VISION_FAMILIES[name], cut.token_ids, response, cut.images)[end - 1 :]
    for one, other, expected in zip(*zip(*both, strict=True), own, strict=True):
        expected = ban(expected[None], placeholder_ids(model.config), 0.0)
        assert_values_close(unbanned(model, one), expected)
        assert_values_close(unbanned(model, other), expected)


@torch.no_grad()
def test_positions_may_be_more_than_tokens():
    """No image is so, but the table of angles has them."""
    model, prompt = model_of("Qwen2-VL"), sample_of("Qwen2-VL")
    assert prompt.images is not None
    assert prompt.images.axes is not None
    far = replace(prompt, images=replace(prompt.images, axes=prompt.images.axes + 40))
    assert shift_of(tokens_of(far)) > 0
    for one, other in both_ways(model, [tokens_of(far)], ([0, 0], (9, None)), 20):
        assert_values_close(unbanned(model, one), unbanned(model, other))


class Looks:
    """A workflow: the model is shown a picture, hears something, and is shown another picture."""

    def __init__(self, name: str) -> None:
        self.of = VISION_FAMILIES[name]

    async def __call__(self, prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        async def one(own: Sampler, sample: int) -> Trajectory:
            trajectory, draw = own.trajectory(), torch.Generator().manual_seed(sample)
            for turn in range(5):
                await own.sample(trajectory, max_tokens=3 + (sample + turn) % 3)
                if turn in (0, 2):
                    trajectory.observe(text(draw, 2, 9), "")
                elif turn < 4:
                    ids, images = self.of.prompt(30 + 10 * turn + sample, images=1 + sample % 2)
                    trajectory.observe(ids, "", images)
            return trajectory

        samples = iter(range(8))

        async def numbered(own: Sampler) -> Trajectory:
            return await one(own, next(samples))

        return await sampler.gather(numbered)


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["plain", "recorded"])
@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "InternVL", "SmolVLM"])
@torch.no_grad()
def test_turns_go_on_with_what_was_kept_of_images(name, recorder, monkeypatch):
    model, batch = frozen(name), prompts_of(name)
    sampling = Sampling(2, 90, seed=4)

    def sampled(engine: Any) -> Any:
        return WorkflowEngine(engine, Looks(name), "looks", TOKENIZER, 60.0).generate(batch, sampling)

    engine = engine_of(model, max_sequences=6, recorder=recorder)
    encoder = image_encoder(model)
    assert encoder is not None
    before = encoder.encoded
    found = sampled(engine)
    every = {part.digest for seen in found.seen for each in seen for part in each.parts}
    every |= {part.digest for prompt in batch.prompts if prompt.images is not None for part in prompt.images.parts}
    assert encoder.encoded - before == len(every)
    assert engine.metrics["rollout/continued_tokens"] > 0
    with monkeypatch.context() as patch:
        patch.setattr("hwgrpo.rollout.local.engine.check_lean_step", lambda *_, **__: "it is disabled")
        own = engine_of(model, max_sequences=6)
        expected = sampled(own)
    assert own.metrics["rollout/continued_tokens"] == 0
    assert_same(found, expected)


def test_a_trained_tower_encodes_only_the_images_that_are_new():
    model, batch = copy.deepcopy(model_of("Qwen2-VL")), PromptBatch(prompts_of("Qwen2-VL").prompts[:1])
    encoder = image_encoder(model)
    assert encoder is not None
    assert encoder.trains
    engine = engine_of(model)
    before = encoder.encoded
    WorkflowEngine(engine, Looks("Qwen2-VL"), "looks", TOKENIZER, 60.0).generate(batch, Sampling(1, 90, seed=4))
    assert encoder.encoded - before == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen2-VL", "SmolVLM"])
def test_turns_of_unequal_length_are_continued_around_held_images(name):
    """What is computed again of the shorter ones must not be a part of an image."""
    model, of, draw = model_of(name), VISION_FAMILIES[name], torch.Generator().manual_seed(6)
    rows, sequences, beginnings = LeanRows(model, CPU), [], []
    for number, (images, after, new) in enumerate(((1, 1, 3), (1, 9, 4), (0, 5, 5), (1, 2, 5), (2, 0, 6))):
        ids, seen = of.prompt(40 + number, images) if images else (text(draw, 5, 5), None)
        ids = [*ids[: len(ids) - 1 - ids[::-1].index(seen.token_id) + 1], *text(draw, after, after)] if seen else ids
        if seen is not None and seen.axes is not None:
            seen = replace(seen, axes=seen.axes[: len(ids)])
        beginning = tokens_of(Prompt("", "", tuple(ids), None, {}, images=seen))
        sequence = tokens_of(Prompt("", "", (*ids, *text(draw, new, new)), None, {}, images=seen))
        [place], _ = rows.prefill([beginning])
        beginnings.append(replace(rows.park(~place, len(ids)), images=digests_of(beginning)))
        sequences.append(sequence)
    longer, logits = prefill_after(model, CPU, beginnings, sequences)
    for sequence, row, found in zip(sequences, longer, logits, strict=True):
        whole = ModelRows(model, CPU)
        own = whole.prefill([sequence])[1]
        assert_values_close(unbanned(model, found[None]), unbanned(model, own))
        for (one, _), layer in zip(((each, 0) for each in row.layers), whole.cache.layers, strict=True):
            kept = torch.stack([layer.keys[0], layer.values[0]])[:, :, row.prompt.length :]
            assert_values_close(one, kept)


def test_a_turn_with_other_images_continues_nothing():
    """Its tokens are those of the kept response, and what they stand for is not."""
    model, (first, twin) = model_of("Qwen2-VL"), (prompts_of("Qwen2-VL").prompts[i] for i in (0, 3))
    prompts = [replace(first, uid="a"), replace(twin, uid="a")]

    class Swaps:
        async def __call__(self, prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
            async def one(own: Sampler) -> Trajectory:
                trajectory = own.trajectory()
                await own.sample(trajectory, max_tokens=4)
                trajectory.prompt = prompts[1]
                await own.sample(trajectory, max_tokens=4)
                trajectory.prompt = prompt
                return trajectory

            return await sampler.gather(one)

    engine = engine_of(model)
    WorkflowEngine(engine, Swaps(), "swaps", TOKENIZER, 60.0).generate(
        PromptBatch((prompts[0],)), Sampling(1, 20, seed=1)
    )
    assert engine.metrics["rollout/continued_tokens"] == 0


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_sample_the_same(merged, monkeypatch):
    model, batch = copy.deepcopy(model_of("Qwen3-VL")), prompts_of("Qwen3-VL")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|v_proj|up_proj)|.*visual.*(qkv)")
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    adapted.eval()
    engine = engine_of(adapted, max_sequences=4, merge_adapters=merged, image_sample=sample_of("Qwen3-VL"))
    assert engine.decode_path == "lean"
    expected = by_the_model(adapted, batch, SAMPLED, monkeypatch)
    assert_same(engine.generate(batch, SAMPLED), expected)
    plain = engine_of(model_of("Qwen3-VL")).generate(batch, SAMPLED)
    assert plain.tokens.tolist() != expected.tokens.tolist()


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["plain", "recorded"])
@pytest.mark.parametrize("shared", [True, False])
def test_what_an_optimizer_writes_in_place_is_what_samples(recorder, shared, monkeypatch):
    model, batch = copy.deepcopy(model_of("Qwen2.5-VL")), prompts_of("Qwen2.5-VL")
    if not shared:
        model = model.double()
    engine = engine_of(model, recorder=recorder)
    before = engine.generate(batch, SAMPLED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.update_weights(1)
    after = engine.generate(batch, SAMPLED)
    assert after.tokens.tolist() != before.tokens.tolist()
    assert_same(after, by_the_model(model, batch, SAMPLED, monkeypatch))


@pytest.mark.parametrize("wrong", [lambda prompt: 0, lambda prompt: 1 + shift_of(prompt)], ids=["none", "one more"])
@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["plain", "recorded"])
@torch.no_grad()
def test_positions_that_are_not_the_models_are_found_out_before_it_samples(wrong, recorder, monkeypatch):
    model = frozen("Qwen2-VL")
    encoder = image_encoder(model)
    assert encoder is not None
    encoder.sample = sample_of("Qwen2-VL")
    assert check_lean_step(model, CPU, recorder) is None
    monkeypatch.setattr(lean_step, "shift_of", wrong)
    assert (check_lean_step(model, CPU, recorder) or "").startswith("its logits would differ by")
    encoder.sample = None
    assert engine_of(model, image_sample=sample_of("Qwen2-VL"), recorder=recorder).decode_path == "model"


def test_a_hook_on_the_tower_leaves_the_step_lean_and_one_on_the_text_model_does_not():
    model = frozen("Qwen2-VL")
    model.model.visual.blocks[0].register_forward_hook(lambda *_: None)
    assert unsupported_reason(model, 50) is None
    model.model.language_model.layers[1].register_forward_hook(lambda *_: None)
    assert unsupported_reason(model, 50) == "a forward hook is registered on model.language_model.layers.1"
