"""Thumbnails of images beside completions.jsonl, and images in the text of samples."""

import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from hwgrpo.data.thumbnails import LONGEST_SIDE, make_thumbnail
from hwgrpo.observe.completions import CompletionsLog, dropped_records, pick_sample, sample_record
from hwgrpo.observe.trajectory_text import compact_turns
from hwgrpo.values import PromptBatch, PromptImages, read_images, write_images
from tests.observe.values import batch_of

MARK = "<|image_pad|>"


def thumbnail(color, size=(32, 24)):
    return make_thumbnail(Image.new("RGB", size, color))


def images_of(*colors, size=(32, 24), inputs=None):
    return PromptImages(inputs or {}, "", 7, thumbnails=tuple(thumbnail(each, size) for each in colors), mark=MARK)


def with_images(*colors_of_each):
    """A batch of one response to each prompt with images of these colors."""
    batch, *others = batch_of([1] * len(colors_of_each))
    prompts = [replace(each, images=images_of(*colors)) for each, colors in zip(batch.prompts, colors_of_each)]
    return PromptBatch(tuple(prompts)), *others


def logged(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def files(folder):
    return sorted(f"images/{path.name}" for path in (folder / "images").glob("*"))


@pytest.mark.parametrize(
    ("image", "form"),
    [
        (Image.new("RGB", (1000, 500), "red"), "PNG"),
        (Image.new("RGB", (31, 90), "red"), "PNG"),
        (Image.effect_noise((600, 1200), 90).convert("RGB"), "JPEG"),
    ],
)
def test_a_thumbnail_is_small_and_knows_the_size_of_the_image(image, form):
    made = make_thumbnail(image)
    small = Image.open(io.BytesIO(made.content))
    assert (made.width, made.height) == image.size
    assert max(small.size) == min(LONGEST_SIDE, max(image.size))
    assert small.width * image.height == pytest.approx(small.height * image.width, rel=0.02)
    assert small.format == form


def test_a_drawing_is_stored_without_loss():
    image = Image.new("RGB", (40, 40), "white")
    image.paste("blue", (3, 3, 5, 9))
    assert Image.open(io.BytesIO(make_thumbnail(image).content)).convert("RGB").tobytes() == image.tobytes()


def test_each_distinct_image_is_written_once_and_referred_to(tmp_path):
    log = CompletionsLog(tmp_path, 8, 10)
    log.log(1, *with_images(["red", "blue"], ["red"]))
    first, second = logged(tmp_path)
    assert [(each["width"], each["height"]) for each in first["images"]] == [(32, 24)] * 2
    assert [each["file"] for each in second["images"]] == [first["images"][0]["file"]]
    assert files(tmp_path) == sorted(each["file"] for each in first["images"])
    assert Image.open(tmp_path / first["images"][1]["file"]).getpixel((0, 0)) == (0, 0, 255)


def test_no_more_files_are_written_than_the_setting_allows(tmp_path):
    CompletionsLog(tmp_path, 8, 2).log(1, *with_images(["red"], ["blue"], ["green"], ["red"]))
    named = [record["images"][0]["file"] for record in logged(tmp_path)]
    assert named[2] is None
    assert named[3] == named[0]
    assert len(files(tmp_path)) == 2
    CompletionsLog(tmp_path, 8, 2).log(2, *with_images(["yellow"]))  # a restarted run counts those that are there
    assert len(files(tmp_path)) == 2


def test_with_the_setting_at_zero_there_is_no_folder(tmp_path):
    CompletionsLog(tmp_path, 8, 0).log(1, *with_images(["red"]))
    assert logged(tmp_path)[0]["images"] == [{"file": None, "width": 32, "height": 24}]
    assert not (tmp_path / "images").exists()


def test_cutting_the_log_back_removes_the_images_of_later_steps_alone(tmp_path):
    log = CompletionsLog(tmp_path, 8, 3)
    log.log(1, *with_images(["red"]))
    log.log(2, *with_images(["red", "blue"], ["green"]))
    (tmp_path / "images" / "mine.png").write_bytes(b"")
    log.cut_back(1)
    kept = logged(tmp_path)[0]["images"][0]["file"]
    assert files(tmp_path) == sorted([kept, "images/mine.png"])
    log.log(2, *with_images(["blue"], ["green"]))
    named = [record["images"][0]["file"] for record in logged(tmp_path)]
    assert files(tmp_path) == sorted([*named, "images/mine.png"])
    log.cut_back(-1)
    assert files(tmp_path) == ["images/mine.png"]


def test_a_prompt_of_text_has_no_images_in_its_record(tmp_path):
    CompletionsLog(tmp_path, 8, 3).log(1, *batch_of([1]))
    assert "images" not in logged(tmp_path)[0]


def test_a_group_that_was_dropped_shows_its_images_from_any_rank_and_checkpoint(tmp_path):
    batch, completions, rewards, advantages = with_images(["red"], ["blue", "red"])
    late = replace(completions, dropped={1: "no responses in time"})
    dropped = json.loads(json.dumps([*dropped_records(batch, late)]))  # as a checkpoint stores them
    log = CompletionsLog(tmp_path, 1, 10)
    log.log(1, batch, completions, rewards, advantages, dropped)
    kept, lost = logged(tmp_path)
    assert lost["dropped"] == "no responses in time"
    assert [(each["width"], each["height"]) for each in lost["images"]] == [(32, 24)] * 2
    assert lost["images"][1] == kept["images"][0]
    assert files(tmp_path) == sorted(each["file"] for each in lost["images"])
    text, answers, *_ = batch_of([1])
    [record] = dropped_records(text, replace(answers, dropped={0: "late"}))
    assert "images" not in record


def test_images_of_earlier_turns_come_first():
    batch, completions, rewards, _ = with_images(["red"])
    images = replace(batch.prompts[0].images, earlier=(images_of("blue", size=(8, 8)),))
    batch = PromptBatch((replace(batch.prompts[0], images=images),))
    assert [each["width"] for each in sample_record(0, batch, completions, rewards)["images"]] == [8, 32]


def test_the_sample_that_is_shown_has_labels_in_place_of_images():
    batch, completions, rewards, _ = with_images(["red", "blue"])
    image, text = {"type": "image"}, {"type": "text", "text": "Which is larger?"}
    messages = ({"role": "user", "content": [image]}, {"role": "user", "content": [image, text]})
    messages += ({"role": "assistant", "content": "The"},)
    images = replace(batch.prompts[0].images, thumbnails=(thumbnail("red", (8, 8)), thumbnail("blue")))
    prompt = replace(batch.prompts[0], messages=messages, images=images)
    shown = pick_sample(0, PromptBatch((prompt,)), completions, rewards)
    assert shown is not None
    assert shown.prompt == "[image 32x24] Which is larger?"


def test_no_text_shows_the_tokens_of_an_image_one_by_one(tmp_path):
    row = f"{MARK * 20}<|row|>"
    text = f"look<|start|>{row * 30}{MARK * 20}<|end|>\n<|start|>{MARK}<|end|> red {'<b>' * 5}"
    batch, completions, *others = batch_of([1, 1])
    completions = replace(
        completions, texts=(text, text), seen=((images_of("red"), images_of("blue", size=(9, 8))), ())
    )
    log = CompletionsLog(tmp_path, 8, 3)
    log.log(1, batch, completions, *others)
    observed, sampled = logged(tmp_path)
    assert observed["response"] == f"look<|start|>[image 32x24]<|end|>\n<|start|>[image 9x8]<|end|> red {'<b>' * 5}"
    assert [each["width"] for each in observed["observed_images"]] == [32, 9]
    assert sampled["response"] == text  # without images these are the policy's own
    log.cut_back(1)
    assert len(files(tmp_path)) == 2


def test_turns_with_images_are_shown_by_labels():
    content = [{"type": "image"}, {"type": "text", "text": "a cat"}]
    turns = [{"role": "assistant", "content": "look"}, {"role": "tool", "content": content}]
    outcome = {"messages": turns, "turn_rewards": [0.0], "stop": "done"}
    assert compact_turns(outcome) == "policy: look\ntool: [image] a cat\n(done)"
    assert compact_turns(outcome, [thumbnail("red")]) == "policy: look\ntool: [image 32x24] a cat\n(done)"


def test_thumbnails_are_stored_with_observed_images():
    images = replace(images_of("red", inputs={"pixels": torch.ones(2)}), tokens=(4,))
    seen = ((images,), ())
    tensors, known = write_images(seen, "seen")
    [[read], nothing] = read_images(tensors, "seen", json.loads(json.dumps(known)))
    assert nothing == ()
    assert (read.thumbnails, read.mark, read.tokens) == (images.thumbnails, MARK, (4,))
