"""Observations with images: their tokens, what is recorded of them, and what happens to those that cannot be shown."""

import base64
import io
from functools import cache, partial
from typing import Any

import pytest
import torch
from PIL import Image

from hwgrpo.agents.environments import EnvironmentFailure, checked_messages
from hwgrpo.agents.looking import Looking
from hwgrpo.config.schema import DataConfig, DataImagesConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.image_prompts import ImagePrompts, by_marks, image_axes, marks_of
from hwgrpo.data.observed_images import ObservedImages, without_images
from hwgrpo.data.picture_tasks import LOOK
from hwgrpo.data.tasks import parse_task
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models import tiny_vision
from hwgrpo.rollout.turn_template import TurnTemplate

SMALL, LARGE = (16, 16), (32, 24)


def picture(size: tuple[int, int], color: str = "red") -> dict[str, Any]:
    """Return a block with an image."""
    return {"type": "image", "image": Image.new("RGB", size, color)}


@cache
def parts() -> tuple[Any, ImagePrompts, Any]:
    """Return the tokenizer of a small model, what makes its prompts, and its configuration."""
    task = parse_task("task://look")
    model, tokenizer, processor = tiny_vision.make(task=task, seed=0, hidden=32, layers=1, steps=0, batch=1, lr=1e-3)  # type: ignore[arg-type]
    token_id = model.config.image_token_id

    def render() -> str:
        content = [{"type": "image"}, {"type": "text", "text": "?"}]
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)

    made = by_marks(processor, render, token_id, model.config, tokenizer)
    return tokenizer, made, model.config


def template(**settings: Any) -> TurnTemplate:
    tokenizer, prompts, _ = parts()
    render = partial(apply_template, config=DataConfig(), tokenizer=tokenizer, place="test")
    images = ObservedImages(prompts, DataImagesConfig(**settings))
    return TurnTemplate(render, tokenizer, [tokenizer.eos_token_id], images)


def between(content: Any, turns: TurnTemplate | None = None) -> tuple[list[int], Any]:
    tokenizer, *_ = parts()
    sampled = [*tokenizer.encode(LOOK, add_special_tokens=False), tokenizer.eos_token_id]
    return (turns or template()).between_with_images(sampled, True, [{"role": "user", "content": content}])


def test_prompt_turn_and_observation_are_the_tokens_of_the_whole_conversation():
    tokenizer, prompts, _ = parts()
    content = [picture(SMALL), {"type": "text", "text": "and "}, picture(LARGE)]
    tokens, images = between(content)
    said = [*tokenizer.encode(LOOK, add_special_tokens=False), tokenizer.eos_token_id]
    messages = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": LOOK},
        {"role": "user", "content": [without_images({"content": content})["content"][i] for i in range(3)]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole, of_whole = prompts.encode(text, [content[0]["image"], content[2]["image"]], "test")
    before = tokenizer.encode("<|user|>what?<|assistant|>", add_special_tokens=False)
    assert [*before, *said, *tokens] == whole
    assert torch.equal(images.inputs["pixel_values"], of_whole.inputs["pixel_values"])
    start = len(before) + len(said)
    assert of_whole.axes is not None
    assert torch.equal(images.axes + start, of_whole.axes[start:])
    assert torch.equal(images.axes, image_axes(tokens, images.token_id, [(2, 2), (3, 4)]))


def test_records_have_bare_blocks():
    message = {"role": "user", "content": [picture(SMALL), {"type": "text", "text": "look"}]}
    assert without_images(message) == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}
    assert without_images({"role": "user", "content": "text"}) == {"role": "user", "content": "text"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "image", "base64": base64.b64encode(b"no image").decode()}], "image 1"),
        ([{"type": "image", "path": "missing.png"}], "missing.png"),
        ([{"type": "image", "url": "https://example.com/a.png"}], "allow_urls"),
        ([picture(SMALL)] * 3, "3 images, more than data.images.max_per_prompt=2"),
        ([picture(SMALL), {"type": "text", "text": "<|image_pad|>"}], "has 1 images, and its text has"),
    ],
    ids=["broken", "missing", "URL", "too many", "a mark in the text"],
)
def test_an_image_that_cannot_be_shown_is_an_error(content: list[Any], problem: str):
    _, prompts, config = parts()
    prompts = ImagePrompts(
        prompts.process, prompts.render, prompts.token_id, prompts.grids, marks_of(config, parts()[0])
    )
    turns = template(max_per_prompt=2)
    turns._images = ObservedImages(prompts, DataImagesConfig(max_per_prompt=2))
    with pytest.raises(DataError, match=problem):
        between(content, turns)


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_text_with_the_mark_of_an_image_is_an_error_without_images_too(rewrites: bool):
    tokenizer, prompts, _ = parts()
    config = DataConfig()

    def render(messages: Any, **options: Any) -> str:
        text = apply_template(messages, config, tokenizer, "test", **options)
        return text.replace(messages[1]["content"], "", 1) if rewrites and len(messages) > 2 else text

    ends, images = [tokenizer.eos_token_id], ObservedImages(prompts, DataImagesConfig())
    messages = [{"role": "user", "content": f"You said: {tiny_vision.IMAGE}"}]
    with pytest.raises(DataError, match="an observation: the prompt has 0 images, and its text has"):
        TurnTemplate(render, tokenizer, ends, images).between([0], False, messages)
    found = TurnTemplate(render, tokenizer, ends).between([0], False, messages)  # of a text model
    assert (found is None) == rewrites


def test_relative_paths_of_observations_begin_in_the_working_folder_or_the_setting(tmp_path, monkeypatch):
    Image.new("RGB", SMALL).save(tmp_path / "a.png")
    content = [{"type": "image", "path": "a.png"}]
    assert len(between(content, template(folder=str(tmp_path)))[1].all_thumbnails) == 1
    with pytest.raises(DataError, match=r"those of observations: at the working folder"):
        between(content)
    monkeypatch.chdir(tmp_path)
    assert len(between(content)[1].all_thumbnails) == 1


def test_a_text_model_refuses_observed_images():
    tokenizer, *_ = parts()
    render = partial(apply_template, config=DataConfig(), tokenizer=tokenizer, place="test")
    with pytest.raises(DataError, match="the model reads text alone"):
        between([picture(SMALL)], TurnTemplate(render, tokenizer, [tokenizer.eos_token_id]))


def test_a_template_that_rewrites_turns_shows_no_images():
    tokenizer, prompts, _ = parts()
    config = DataConfig()

    def render(messages: Any, **options: Any) -> str:
        text = apply_template(messages, config, tokenizer, "test", **options)
        return text.replace(messages[1]["content"], "", 1) if len(messages) > 2 else text

    turns = TurnTemplate(render, tokenizer, [tokenizer.eos_token_id], ObservedImages(prompts, DataImagesConfig()))
    with pytest.raises(ConfigError, match="which a history that is rewritten does not show"):
        between([picture(SMALL)], turns)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("text", "text"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}], "ab?"),
        ([{"type": "image", "path": "a.png"}], [{"type": "image", "path": "a.png"}]),
    ],
)
def test_contents_of_an_environment_are_text_or_blocks(content: Any, found: Any):
    assert checked_messages([{"role": "user", "content": content}], "step")[0]["content"] == found


@pytest.mark.parametrize(
    "content", [5, [5], [{"type": "video", "path": "a.mp4"}], [{"type": "image"}], [{"type": "image", "data": "a"}]]
)
def test_other_contents_are_failures_of_the_environment(content: Any):
    with pytest.raises(EnvironmentFailure):
        checked_messages([{"role": "user", "content": content}], "step")


def test_the_board_is_shown_once_and_only_when_it_is_asked_for():
    file = io.BytesIO()
    Image.new("RGB", SMALL).save(file, format="PNG")
    row = {"picture": base64.b64encode(file.getvalue()).decode(), "ground_truth": "r3"}
    environment = Looking()

    def step(text: str) -> Any:
        return environment.step(type("Said", (), {"content": text})())  # type: ignore[arg-type]

    environment.reset(row)
    shown = step(LOOK)
    assert (shown.done, shown.messages[0]["content"][0]["base64"]) == (False, row["picture"])
    assert (step(LOOK).done, step("r3").reward, step("r2").reward) == (True, 1.0, 0.0)
    environment.reset(row)
    assert step("r3").reward == 1.0
