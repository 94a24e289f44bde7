"""Rows with images become tokens and pixels for a model that reads images; for a text model they are an error."""

import json
from dataclasses import replace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from hwgrpo.config.schema import DataConfig, DataImagesConfig, FewShotConfig
from hwgrpo.data.image_prompts import load_image_prompts
from hwgrpo.data.images import FORMATS
from hwgrpo.data.inspection import Lengths, Repeat, Settings, inspect_files
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.support.given_objects import given
from tests.support.models.tiny_image_prompts import (
    MARKS,
    SHOWN,
    TEMPLATE,
    image_config,
    image_processor,
    image_prompts,
    picture,
)

PAD = MARKS[1]


def question(text, *images, **columns):
    return {"prompt": [{"role": "user", "content": text}], "images": list(images), "answer": "1", **columns}


@pytest.fixture
def parquet(tmp_path):
    """Return a function that writes rows to a Parquet file, images as bytes."""

    def write(rows, name="train.parquet"):
        rows = [{**row, "images": [{"bytes": each, "path": None} for each in row["images"]]} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def build(data_config, seeing_tokenizer, seeing):
    """Return a function that builds the training data of a model that reads images."""

    def make(path, encode=seeing, tokenizer=seeing_tokenizer, images=None, **settings):
        settings = {"max_prompt_tokens": 200, "images": DataImagesConfig(**images or {}), **settings}
        return build_dataset(data_config(path, **settings), tokenizer, "train", None, encode)

    return make


def shown(*counts):
    """Return the text of images of so many tokens."""
    return ["<|vision_start|>" + PAD * count + "<|vision_end|>" for count in counts]


def test_a_prompt_has_one_token_per_part_of_its_images_and_their_pixels(parquet, build, seeing, seeing_tokenizer):
    rows = [question("is <image> <image>?", picture(16, 8), picture(8, 24, "blue")), question("plain")]
    data = build(parquet(rows))
    prompt, plain = data.prompt(0, 0), data.prompt(1, 0)
    assert prompt.text == f"<user>is {SHOWN} {SHOWN}?\n<assistant>"
    one, other = shown(2, 3)
    expected = seeing_tokenizer(f"<user>is {one} {other}?\n<assistant>", add_special_tokens=False)["input_ids"]
    assert list(prompt.token_ids) == expected == list(data.token_ids[0])
    assert prompt.images.inputs["image_grid_thw"].tolist() == [[1, 2, 4], [1, 6, 2]]
    assert prompt.images.inputs["pixel_values"].shape == (8 + 12, 3 * 2 * 4 * 4)
    assert prompt.token_ids.count(prompt.images.token_id) == 5
    assert prompt.images.axes.shape == (len(prompt.token_ids), 3)
    assert [(each.width, each.height) for each in prompt.images.all_thumbnails] == [(16, 8), (8, 24)]
    assert prompt.images.mark == "<|image_pad|>"
    assert prompt.images.tokens == (2, 3) == data.image_tokens
    assert data.prompts_with_images == 1
    assert prompt.messages == (
        {"role": "user", "content": [
            {"type": "text", "text": "is "}, {"type": "image"}, {"type": "text", "text": " "}, {"type": "image"},
            {"type": "text", "text": "?"},
        ]},
    )  # fmt: skip
    assert prompt.columns["images"][0]["bytes"] == picture(16, 8)
    assert data.longest == len(expected)
    assert (plain.images, plain.text) == (None, "<user>plain\n<assistant>")
    assert list(data.findings) == []


def test_images_keep_their_order_and_their_pixels(parquet, build):
    data = build(parquet([question("<image><image>", picture(8, 8, "red"), picture(8, 8, "blue"))]))
    pixels = data.prompt(0, 0).images.inputs["pixel_values"].view(2, 4, 3, -1)
    red, blue = pixels.mean(dim=(1, 3))  # per channel
    assert red[0] > red[2]
    assert blue[0] < blue[2]
    assert torch.equal(data.prompt(0, 1).images.inputs["pixel_values"].view(2, 4, 3, -1), pixels)
    assert data.prompt(0, 0).images.digest == data.prompt(0, 1).images.digest


def test_settings_of_prompts_apply_to_those_with_images(parquet, build):
    settings = {
        "system_prompt": "Look.", "instruction": "Now!", "few_shot": [FewShotConfig(prompt="x", response="y")],
    }  # fmt: skip
    rows = [question("<image>a", picture(8, 8)), question("a<image>", picture(8, 8)), question("b")]
    data = build(parquet(rows), **settings)
    before = "<system>Look.\n<user>x Now!\n<assistant>y\n<user>"
    assert list(data.texts) == [
        f"{before}{SHOWN}a Now!\n<assistant>", f"{before}a{SHOWN}Now!\n<assistant>", f"{before}b Now!\n<assistant>",
    ]  # fmt: skip


def test_plain_text_with_images_is_one_user_message(parquet, build):
    rows = [{"prompt": "a", "images": [picture(8, 8)]}, {"prompt": "b", "images": []}]
    for chat, other in (("auto", "b"), ("always", "<user>b\n<assistant>")):
        data = build(parquet(rows), chat=chat)
        assert list(data.texts) == [f"<user>{SHOWN}a\n<assistant>", other]
    with pytest.raises(ConfigError, match=r"data.chat=never .*row 0 has images, which the chat template shows"):
        build(parquet(rows), chat="never")


def test_a_chat_template_that_shows_no_images_is_an_error(
    parquet, build, tokenizer_without_template, seeing_tokenizer, monkeypatch
):
    path = parquet([question("a", picture())])
    with pytest.raises(
        ConfigError, match=r"row 0: the prompt has images.*the tokenizer has none; set model.chat_template"
    ):
        build(path, tokenizer=tokenizer_without_template)
    monkeypatch.setattr(seeing_tokenizer, "chat_template", "{{ messages[0].role }}")
    silent = image_prompts(seeing_tokenizer)
    with pytest.raises(ConfigError, match=r"the chat template writes none of .*image_pad.*; set model.chat_template"):
        build(path, silent)
    monkeypatch.setattr(seeing_tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"the chat template shows no images .*; set model.chat_template"):
        silent.check_marks("a", 1, "here")


def test_placeholders_without_an_image_are_an_error_wherever_they_come_from(parquet, build):
    path = parquet([question("a")])
    for settings in ({"system_prompt": f"Look {PAD}."}, {"few_shot": [FewShotConfig(prompt=PAD, response="y")]}):
        with pytest.raises(DataError, match=r"row 0: the prompt has 0 images, .*image_pad\|> 1 times instead of 0; "):
            build(path, **settings)
    with pytest.raises(DataError, match=r"row 0: the prompt has 1 images, .*vision_start\|> 2 times instead of 1;"):
        build(parquet([question("<image>a", picture())]), instruction=MARKS[0])
    with pytest.raises(DataError, match=r"row 0: the text has '<\|image_pad\|>'"):
        build(parquet([question(PAD, picture())]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("system_prompt", "As in <image>."),
        ("instruction", "<image>"),
        ("few_shot", [FewShotConfig(prompt="<image>x", response="y")]),
        ("few_shot", [FewShotConfig(prompt="x", response="<image>")]),
    ],
)
def test_a_place_of_an_image_in_a_setting_is_an_error(parquet, build, key, value):
    with pytest.raises(ConfigError, match=f"data.{key} has <image>, the place of an image"):
        build(parquet([question("<image>a", picture())]), **{key: value})


def test_tokens_are_counted_against_the_images_whoever_made_them(seeing):
    image = Image.new("RGB", (16, 16))
    for text in ("a", SHOWN * 2):
        with pytest.raises(
            DataError, match=rf"^here: .*with 1 images \(the text has {text.count(PAD)} marks of images\)"
        ):
            seeing.encode(text, [image], "here")

    def lose_one(text, images):
        ids, inputs = seeing.process(text, images)
        ids.remove(seeing.token_id)
        return ids, inputs

    with pytest.raises(DataError, match=r"^here: 1 images have 4 tokens, and the prompt has 3"):
        replace(seeing, process=lose_one).encode(SHOWN, [image], "here")


def test_a_text_model_refuses_rows_with_images(parquet, build, tokenizer):
    path = parquet([question("a"), question("<image>a", picture())])
    with pytest.raises(DataError, match=r"row 1: column 'images' holds images, video or sound, and prompts are text"):
        build(path, None, tokenizer)
    with pytest.raises(ConfigError, match=r"data.images.key=images names a column of images, and the model reads text"):
        build(path, None, tokenizer, {"key": "images"})


def test_every_bad_image_is_found_when_the_data_is_opened(parquet, build, jsonl):
    with pytest.raises(DataError, match=r"train.parquet, row 1: image 2 is broken or truncated"):
        build(parquet([question("a", picture()), question("a", picture(), picture(form="jpeg")[:-30])]))
    with pytest.raises(DataError, match=r"data.jsonl, line 1: image 1: the file '.*/a.png' does not exist"):
        build(jsonl([question("a", "a.png")]))
    with pytest.raises(DataError, match=r"no column 'pictures' \(data.images.key\)"):
        build(jsonl([question("a")]), images={"key": "pictures"})


def test_paths_begin_at_the_data_file_and_a_changed_file_is_an_error(jsonl, build, tmp_path, monkeypatch):
    path = jsonl([question("<image>a", "b/a.png")], "data/rows.jsonl")
    (tmp_path / "data/b").mkdir()
    (tmp_path / "data/b/a.png").write_bytes(picture(8, 8))
    monkeypatch.chdir(tmp_path)
    data = build("data/rows.jsonl")
    assert build(path).fingerprint == data.fingerprint
    monkeypatch.chdir("/")
    assert data.prompt(0, 0).images.inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    (tmp_path / "data/b/a.png").write_bytes(picture(8, 8, "blue"))
    with pytest.raises(DataError, match=r"line 1: its images changed since the run started"):
        data.prompt(0, 1)
    assert build(path).fingerprint != data.fingerprint


def test_the_fingerprint_includes_images_in_every_form(build, parquet):
    red, blue = (build(parquet([question("<image>a", picture(8, 8, color))])).fingerprint for color in ("red", "blue"))
    assert red["sha256"] != blue["sha256"]
    assert red["text_sha256"] != blue["text_sha256"]
    digests = []
    for color in ("red", "blue"):
        with given({"object://rows": [{"prompt": "a", "images": [Image.new("RGB", (8, 8), color)]}]}):
            digests.append(build("object://rows").fingerprint["sha256"])
    assert digests[0] != digests[1]


def test_a_dataset_in_memory_with_pictures_is_read(build):
    table = datasets.Dataset.from_list(
        [{"prompt": "a", "image": Image.new("RGB", (8, 16), "red")}],
        features=datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()}),
    )
    with given({"object://rows": table}):
        prompt = build("object://rows").prompt(0, 0)
    assert prompt.images.inputs["image_grid_thw"].tolist() == [[1, 4, 2]]


def test_long_prompts_are_dropped_by_the_tokens_of_their_images_and_never_cut(parquet, build):
    path = parquet([question("<image>", picture(8, 8)), question("<image>", picture(64, 64))])
    data = build(path, max_prompt_tokens=40)
    assert (len(data), data.filtered, list(data.kept)) == (1, 1, [0])
    for policy in ("truncate_left", "truncate_right"):
        with pytest.raises(
            DataError, match=rf"row 1: .*more than data.max_prompt_tokens=40, and data.overlong={policy}"
        ):
            build(path, max_prompt_tokens=40, overlong=policy)
    with pytest.raises(DataError, match=r"row 1: the prompt has 8\d tokens, data.max_prompt_tokens=40"):
        build(path, max_prompt_tokens=40, overlong="error")
    assert len(build(path, max_prompt_tokens=40, images={"max_pixels": 16 * 16})) == 2


def test_rows_that_tools_and_environments_change_keep_their_images(parquet, data_config, seeing_tokenizer, seeing):
    rows = data_config(parquet([question("a", picture())]))
    data = build_dataset(rows, seeing_tokenizer, "train", lambda rows, count: rows, seeing)
    assert data is not None
    assert data.prompt(0, 0).images is not None


PARTS_ALONE = TEMPLATE.replace("{{ m.content }}", "")
REFUSES_TEXT = TEMPLATE.replace("{{ m.content }}", "{{ raise_exception('parts, please') }}")
TEXT_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content + '!' }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize(
    ("template", "written"),
    [(PARTS_ALONE, "<system>Be."), (REFUSES_TEXT, "<system>Be."), (TEXT_SYSTEM, "Be.!<system>Be.")],
)
def test_templates_of_parts_alone_and_of_text_for_the_system_are_served(
    template, written, parquet, build, seeing_tokenizer, monkeypatch
):
    monkeypatch.setattr(seeing_tokenizer, "chat_template", template)
    data = build(parquet([question("<image>a", picture(8, 8)), question("b")]), system_prompt="Be.")
    assert list(data.texts) == [f"{written}\n<user>{SHOWN}a\n<assistant>", f"{written}\n<user>b\n<assistant>"]
    assert list(data.findings) == []


def test_image_prompts_are_loaded_from_a_models_folder(tmp_path, seeing_tokenizer, seeing):
    image_processor().save_pretrained(tmp_path)
    config = image_config(seeing_tokenizer)
    loaded = load_image_prompts(str(tmp_path), None, config, seeing_tokenizer)
    assert loaded.marks == seeing.marks == frozenset(MARKS)
    ids, images = loaded.sample()
    expected, same = seeing.sample()
    assert (ids, images.digest) == (expected, same.digest)
    config.vision_config = None
    assert load_image_prompts(str(tmp_path), None, config, seeing_tokenizer) is None


def settings_of(images=None, tokenizer=None, **data):
    return Settings(DataConfig(train="", **data), None, tokenizer, 0, None, True, images)


def test_an_inspection_shows_images_their_sizes_and_the_bad_ones(parquet, seeing, seeing_tokenizer):
    rows = [
        question("<image>a", picture(8, 8)), question("<image><image>", picture(16, 24), picture(40, 8)), question("c"),
        question("<image>a", picture(8, 8, "blue")), question("<image>a", b"broken"), question("<image>a"),
        question("<image> a", picture(8, 8)),
    ]  # fmt: skip
    path = parquet(rows)
    (report,) = inspect_files([str(path)], settings_of()).files
    assert {bad.index: bad.reason for bad in report.bad} == {
        4: f"image 1 is of no known format (its file begins with b'broken'); store it as {', '.join(FORMATS)}",
        5: "the prompt has 1 places for images (<image>, or blocks without an image), and column 'images' has 0 "
        "images; write one place per image, or none at all to show them before the text",
    }
    assert report.images.per_row == {1: 3, 2: 1}
    assert (report.images.widths, report.images.heights) == (Lengths(8, 8, 40, 40), Lengths(8, 8, 24, 24))
    assert report.tokens is None
    counted = inspect_files([str(path)], settings_of(seeing, seeing_tokenizer)).files[0]
    around = len("<user>\n<assistant>")
    assert (counted.tokens.min, counted.tokens.max) == (around + 1, around + (2 + 6) + (2 + 5))
    assert (report.image_tokens, counted.image_tokens) == (None, Lengths(1, 1, 11, 11))
    assert [bad.index for bad in counted.bad] == [4, 5]


def test_rows_with_the_same_text_and_other_images_are_no_repeats(parquet):
    rows = [question("<image>a", picture(8, 8, color)) for color in ("red", "blue", "red")]
    path = parquet(rows)
    (report,) = inspect_files([str(path)], settings_of()).files
    assert report.repeats == [Repeat(f"{path}, row 2", f"{path}, row 0")]
    assert json.loads(json.dumps(report.images.per_row)) == {"1": 3}


def test_reading_many_images_prints_how_far_it_is(parquet, build, monkeypatch, capsys):
    path = parquet([question("<image>", picture(8, 8)), question("plain"), question("<image>", picture(8, 8))])
    build(path)
    assert capsys.readouterr().err == "", "no wait that is short"
    monkeypatch.setattr("hwgrpo.support.waits.FIRST_REPORT", 0.0)
    monkeypatch.setattr("hwgrpo.support.waits.REPORT_EVERY", 0.0)
    build(path)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"hwgrpo: waiting for the images of data.train ({done} of 3 rows are read): 0 s" for done in (0, 2)
    ]
