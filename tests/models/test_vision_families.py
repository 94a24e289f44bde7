"""Vision-language families: images encoded once and explicit positions against each model's own forward."""

import copy
from typing import Any

import pytest
import torch
import transformers

from hwgrpo.data.image_prompts import MARKED
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models import vision as subject
from hwgrpo.models.lm_head import backbone
from hwgrpo.models.loading import load_model_config
from hwgrpo.models.placeholders import placeholder_ids, reads_images
from hwgrpo.models.vision import (
    ONE_AXIS,
    OTHER,
    THREE_AXES,
    ImageEncoder,
    attends_both_ways,
    freeze_vision,
    unsupported_reason,
    uses_axes,
    vision_parameters,
)
from hwgrpo.rollout.local.architectures import predict_fallback
from hwgrpo.training.policy.auto_settings import choose_layout, layout_note
from hwgrpo.training.policy.layouts import PADDED
from tests.support.models.families import run_settings
from tests.support.models.tiny import settings
from tests.support.models.vision_differences import forward_differences, row_of, run_differences
from tests.support.models.vision_families import (
    IMAGE,
    REFUSED_FAMILIES,
    VIDEO,
    VISION_FAMILIES,
    VOCAB,
    Row,
    encoded_logits,
    frozen,
    left_padded,
    model_of,
    reference_logits,
    with_sound,
)
from tests.support.numbers.rounding import STEP, assert_values_close

DIFFERENT = 1e-2
"""Logits of inputs that are wrong are further away than this from the right ones."""
BOTH_WAYS = ("Gemma 3", "Gemma 4, images both ways")
every_family = pytest.mark.parametrize("name", VISION_FAMILIES)
with_axes = pytest.mark.parametrize(
    "name", [name for name, family in VISION_FAMILIES.items() if uses_axes(family.config())]
)


def reference(name, row, model=None):
    with torch.no_grad():
        model = model_of(name) if model is None else model
        return reference_logits(model, VISION_FAMILIES[name], row.ids, row.response, row.images)


@every_family
def test_images_encoded_once_are_those_of_the_models_own_forward(name):
    found = forward_differences(name)
    assert found.alone < STEP
    assert found.two_images < STEP
    assert found.padded < STEP
    assert found.gradient < STEP
    assert found.encoded == 3  # rows with the same images, and those of an earlier batch, are not encoded again


@every_family
def test_a_step_in_every_layout_and_a_rollout_are_those_of_plain_transformers(name, tmp_path):
    family, found = VISION_FAMILIES[name], run_differences(name, tmp_path)
    assert found.layout == family.layouts[0]
    assert sorted(found.layouts) == sorted(family.layouts)
    for layout, (logprob, gradient) in found.layouts.items():
        assert logprob < STEP, layout
        assert gradient < STEP, layout
    assert found.rollout < STEP
    assert found.decode == ("lean" if predict_fallback(family.config(), 100) is None else "model")


@with_axes
def test_positions_of_a_prompt_are_the_models_own(name):
    for seed, images in ((1, 1), (2, 2), (5, 3)):
        ids, made = VISION_FAMILIES[name].prompt(seed, images)
        row = torch.tensor([ids])
        own, delta = model_of(name).model.get_rope_index(
            row, (row == IMAGE).int(), image_grid_thw=made.inputs["image_grid_thw"]
        )
        assert torch.equal(own[:, 0].T, made.axes)
        assert int(made.axes.max()) + 1 == len(ids) + int(delta)  # where a response begins


@every_family
def test_changed_weights_encode_images_again(name):
    model, row = frozen(name), row_of(name, 1, 1)
    encoder = ImageEncoder(model)
    before = encoded_logits(model, encoder, [row])[0]
    _, _, weight = next(each for each in vision_parameters(model) if each[0] == "tower" and each[2].ndim > 1)
    with torch.no_grad():
        weight.add_(torch.randn_like(weight) * 0.2)
    after = encoded_logits(model, encoder, [row])[0]
    assert encoder.encoded == 2
    assert (after - before).abs().max() > DIFFERENT
    assert_values_close(after, reference(name, row, model))


@pytest.mark.parametrize("trained", ["none", "projector", "all"])
def test_a_tower_of_sound_never_trains_and_all_that_trains_gets_a_gradient(trained):
    model = transformers.AutoModelForImageTextToText.from_config(with_sound(), dtype=torch.float32)
    freeze_vision(model, trained)
    [logits] = encoded_logits(model, ImageEncoder(model), [row_of("Gemma 4", 1, 1)])
    logits.square().sum().backward()
    parameters = dict(model.named_parameters())
    assert {name for name, each in parameters.items() if each.grad is not None} == {
        name for name, each in parameters.items() if each.requires_grad
    }
    sound = {name for name in parameters if "audio" in name}
    assert sound == {f"model.{name}" for part, name, _ in vision_parameters(model) if part == OTHER}
    assert sound
    wanted = {"none": set(), "projector": {"projector"}, "all": {"projector", "tower"}}[trained]
    assert {part for part, _, each in vision_parameters(model) if each.requires_grad} == wanted


def test_encoders_share_a_limit_of_what_they_remember_and_forget_it_when_they_end(monkeypatch):
    first, second = (ImageEncoder(frozen("SmolVLM")) for _ in range(2))
    rows = [row_of("SmolVLM", seed, 1) for seed in (1, 2)]  # images of one size
    [features] = first._features([rows[0].images], torch.device("cpu"))
    monkeypatch.setattr(subject, "REMEMBERED", subject.RememberedFeatures(2 * features.nbytes))

    def encoded(encoder, *numbers):
        before = encoder.encoded
        for number in numbers:
            [found] = encoder._features([rows[number].images], torch.device("cpu"))
            assert found.nbytes == features.nbytes
        return encoder.encoded - before

    assert encoded(first, 0, 1, 0, 1) == 2
    assert encoded(second, 0) == 1  # in place of what was used longest ago
    assert encoded(first, 1) == 0
    assert encoded(first, 0) == 1
    assert encoded(second, 0) == 1
    number = second._number
    assert [key[0] for key in subject.REMEMBERED._known] == [first._number, number]
    subject.REMEMBERED.forget(number)
    assert [key[0] for key in subject.REMEMBERED._known] == [first._number]


def test_the_features_of_a_model_that_is_gone_are_forgotten():
    encoder = ImageEncoder(frozen("Qwen2-VL"))
    encoder._features([row_of("Qwen2-VL", 1, 1).images], torch.device("cpu"))
    number = encoder._number
    assert number in {key[0] for key in subject.REMEMBERED._known}
    del encoder
    assert number not in {key[0] for key in subject.REMEMBERED._known}


def test_an_encoder_that_ends_while_features_are_remembered_does_not_wait_for_itself():
    remembered = subject.RememberedFeatures(1)

    class Collecting:
        """Features during whose size the garbage collector finds an encoder."""

        @property
        def nbytes(self):
            remembered.forget(1)
            return 1

    features: Any = Collecting()
    remembered.put((1, "a"), features)
    remembered.put((2, "b"), features)
    assert remembered.get((1, "a")) is None
    assert remembered.get((2, "b")) is features


def test_trained_weights_are_never_remembered():
    model, row = copy.deepcopy(model_of("Qwen2-VL")), row_of("Qwen2-VL", 1, 1)
    encoder = ImageEncoder(model)
    with torch.no_grad():
        before = encoded_logits(model, encoder, [row])[0]
        _, _, weight = next(vision_parameters(model))
        version = weight._version
        weight.data.add_(torch.randn_like(weight) * 0.2)  # as optimizers with buffers of their own write
        assert weight._version == version
        after = encoded_logits(model, encoder, [row])[0]
    assert (after - before).abs().max() > DIFFERENT
    assert_values_close(after, reference("Qwen2-VL", row, model))


@every_family
def test_tokens_and_features_of_images_must_match(name):
    encoder = ImageEncoder(frozen(name))
    one, two = row_of(name, 1, 1), row_of(name, 2, 2)
    ids = torch.tensor([one.tokens])
    missing = ids[:, torch.tensor([i for i in range(ids.shape[1]) if i != one.ids.index(IMAGE)])]
    further = torch.tensor([[*one.tokens, IMAGE]])
    for wrong, images in ((ids, []), (missing, [one.images]), (further, [one.images]), (ids, [one.images] * 2)):
        with pytest.raises(DataError, match="tokens of the rows stand for parts of images"):
            encoder.inputs(wrong, images)
    both = left_padded([one, two], axes=False)["input_ids"]
    encoder.inputs(both, [one.images, two.images])
    with pytest.raises(DataError, match="tokens of the rows stand for parts of images"):
        encoder.inputs(both, [two.images, one.images])  # as many in all


@every_family
def test_parameters_of_vision_are_all_that_the_text_model_and_its_head_are_not(name):
    model = model_of(name)
    named = {id(parameter): part for part, _, parameter in vision_parameters(model)}
    text_model = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    texts = {id(parameter) for parameter in text_model}
    assert not named.keys() & texts
    assert named.keys() | texts == {id(parameter) for parameter in model.parameters()}
    of_projector, of_tower = (
        {name for part, name, _ in vision_parameters(model) if part == wanted} for wanted in ("projector", "tower")
    )
    assert of_projector
    assert of_tower
    assert not any("merger" in name for name in of_tower)


@every_family
def test_a_family_is_known_by_its_type(name):
    config = model_of(name).config
    assert reads_images(config)
    assert unsupported_reason(config) is None
    video = {VIDEO} if any(hasattr(config, key) for key in ("video_token_id", "video_token_index")) else set()
    assert set(placeholder_ids(config)) == {IMAGE} | video
    assert max(placeholder_ids(config)) < VOCAB


def test_every_known_type_is_compared():
    types = {name: family.config().model_type for name, family in VISION_FAMILIES.items()}
    assert set(types.values()) == THREE_AXES | ONE_AXIS
    assert THREE_AXES == MARKED  # whose prompts get positions in three axes
    assert not THREE_AXES & ONE_AXIS


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("Llama4Config", "does not take images that are encoded once"),
        ("PaliGemmaConfig", "attend to each other both ways"),
        ("MllamaConfig", "cross-attention"),
        ("IdeficsConfig", "cross-attention"),
        ("Florence2Config", "an encoder and a decoder"),
        ("Gemma3nConfig", "timm"),
        ("AriaConfig", "the type aria have not been compared"),
    ],
)
def test_what_cannot_be_trained_with_images_is_refused_by_name(config, reason):
    assert reason in unsupported_reason(getattr(transformers, config)())


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_a_model_that_cannot_be_trained_with_images_is_not_loaded(name, tmp_path):
    model_of(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.* reads images, and cannot be trained: ") as refused:
        load_model_config(run_settings(tmp_path).model)
    assert unsupported_reason(model_of(name).config) in str(refused.value)


def test_text_models_are_not_refused():
    assert unsupported_reason(transformers.Qwen3Config()) is None
    assert unsupported_reason(transformers.Qwen3_5TextConfig()) is None


def test_llama_4_is_refused_because_its_features_cannot_be_passed_on():
    model, family = model_of("Llama 4"), REFUSED_FAMILIES["Llama 4"]
    _, images = family.prompt(1)
    assert model.get_image_features(**images.inputs, return_dict=True).pooler_output is None


def test_paligemma_is_refused_because_a_prompt_attends_both_ways():
    model, family = model_of("PaliGemma"), REFUSED_FAMILIES["PaliGemma"]
    ids, images = family.prompt(1)
    row = torch.tensor([[*ids, 7, 8, 9]])
    prefix = torch.zeros_like(row)
    prefix[:, len(ids) :] = 1  # its processor's: 0 in the prompt
    with torch.no_grad():
        own = model(input_ids=row, token_type_ids=prefix, **images.inputs).logits
        causal = model(input_ids=row, token_type_ids=torch.ones_like(row), **images.inputs).logits
    assert (own - causal)[0, len(ids) :].abs().max() > DIFFERENT


# What transformers computes silently wrong, and what is computed here.


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5-MoE"])
def test_n_sequences_of_generate_are_no_reference_where_images_are_not_encoded_first(name):
    row, family = row_of(name, 2, 2), VISION_FAMILIES[name]
    model = copy.deepcopy(model_of(name))
    ids = torch.tensor([row.ids])
    made = model.generate(
        input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **row.images.inputs, num_return_sequences=3,
        do_sample=True, max_new_tokens=1, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    ).logits[0]  # fmt: skip
    with torch.no_grad():
        expected = reference_logits(model, family, row.ids, [], row.images)[-1].expand(3, -1)
        repeated = [Row(row.ids, row.images, [])] * 3
        ours = torch.stack([each[-1] for each in encoded_logits(model, ImageEncoder(model), repeated)])
    assert (made - expected).abs().max() > DIFFERENT
    assert_values_close(ours, expected)


@with_axes
def test_positions_of_one_axis_are_wrong_for_images(name):
    model, row = model_of(name), row_of(name, 1, 1)
    inputs = left_padded([row], axes=False) | row.images.inputs
    with torch.no_grad():
        counted = model(**inputs, mm_token_type_ids=(inputs["input_ids"] == IMAGE).long()).logits[0]
    expected = reference(name, row)
    assert (counted - expected).abs().max() > DIFFERENT
    assert_values_close(encoded_logits(frozen(name), ImageEncoder(frozen(name)), [row])[0], expected)


@pytest.mark.parametrize("name", [name for name, family in VISION_FAMILIES.items() if family.packs])
def test_positions_that_restart_separate_the_sequences_of_a_row(name):
    model, rows = frozen(name), [row_of(name, seed, images) for seed, images in ((1, 1), (2, 2), (3, 0))]
    encoder = ImageEncoder(model)
    ids = torch.tensor([[token for row in rows for token in row.tokens]])
    positions = torch.cat([row.positions for row in rows], dim=1)[:, None]
    options = encoder.inputs(ids, [rows[0].images, rows[1].images])
    expected = torch.cat([reference(name, row) for row in rows])

    def logits(position_ids):
        hidden = backbone(model)(input_ids=ids, position_ids=position_ids, use_cache=False, **options)
        return model.get_output_embeddings()(hidden.last_hidden_state)[0]

    assert_values_close(logits(positions if encoder.uses_axes else positions[0]), expected)
    if encoder.uses_axes:  # without those of the text no mask is made
        after = len(rows[0].tokens)
        assert (logits(positions[1:]) - expected)[after:].abs().max() > DIFFERENT


def test_types_of_tokens_left_out_count_positions_in_qwen2_5_vl():
    model, row = model_of("Qwen2.5-VL"), row_of("Qwen2.5-VL", 1, 1)
    model.model.rope_deltas = None
    with torch.no_grad():
        counted = model(input_ids=torch.tensor([row.tokens]), **row.images.inputs).logits[0]
    expected = reference("Qwen2.5-VL", row)
    assert (counted - expected).abs().max() > DIFFERENT
    ours = frozen("Qwen2.5-VL")
    assert_values_close(encoded_logits(ours, ImageEncoder(ours), [row])[0], expected)


@every_family
def test_rows_of_several_sequences_are_refused_where_images_attend_both_ways_in_any_dtype(name):
    config = VISION_FAMILIES[name].config()
    assert attends_both_ways(config) == (name in BOTH_WAYS)
    if name not in BOTH_WAYS:
        return
    assert choose_layout(settings(), config, "sdpa") is PADDED
    assert "both ways" in layout_note(settings(), config, "sdpa")
    for layout in (
        "grouped",
        "grouped_masked",
        "packed",
    ):  # in bf16 the start check's tolerance may exceed the difference
        with pytest.raises(ConfigError, match=f"model.layout='{layout}' with a gemma. model: .* both ways"):
            choose_layout(settings(f"model.layout={layout}"), config, "sdpa")


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_types_of_tokens_are_passed_where_images_attend_both_ways(name):
    model, row = frozen(name), row_of(name, 2, 2)
    encoder, inputs = ImageEncoder(model), left_padded([row], axes=False)
    options = encoder.inputs(inputs["input_ids"], [row.images])
    types = VISION_FAMILIES[name].types
    assert options[types].tolist() == [[int(token == IMAGE) for token in row.tokens]]
    del options[types]
    hidden = backbone(model)(**inputs, **options).last_hidden_state
    expected = reference(name, row)
    assert (model.get_output_embeddings()(hidden)[0] - expected).abs().max() > DIFFERENT
    assert_values_close(encoded_logits(model, encoder, [row])[0], expected)


@with_axes
def test_positions_do_not_depend_on_an_earlier_call(name):
    model, row = frozen(name), row_of(name, 1, 1)
    expected = reference(name, row, model)
    ids = torch.tensor([row.tokens])
    embedded = model.get_input_embeddings()(ids)
    embedded[ids == IMAGE] = torch.cat(model.get_image_features(**row.images.inputs, return_dict=True).pooler_output)
    model.model.rope_deltas = torch.tensor([[5]])  # with these, positions are counted, in a model without them, too
    assert (model(inputs_embeds=embedded).logits[0] - expected).abs().max() > DIFFERENT
    assert_values_close(encoded_logits(model, ImageEncoder(model), [row])[0], expected)
