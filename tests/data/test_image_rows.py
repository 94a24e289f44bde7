"""Every way to write where images stand, blocks, `<image>` or nothing; each mismatch is an error with both counts."""

import io
from dataclasses import replace

import numpy
import pytest
from PIL import Image

from hwgrpo.config.schema import DataImagesConfig
from hwgrpo.data.image_rows import BLOCK, read_image_prompt
from hwgrpo.data.row_schema import identity
from hwgrpo.errors import DataError

HERE = "f.jsonl, row 3"


def user(*parts):
    return [{"role": "user", "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}]


def text(value):
    return {"type": "text", "text": value}


def placed(row, data_config, marks=("<|image_pad|>",), **settings):
    return read_image_prompt(row, data_config("f", images=DataImagesConfig(**settings)), marks, HERE)


PLACED = {
    "verl": (
        {"prompt": user("<image>a<image> b"), "images": ["1", "2"]},
        user(BLOCK, text("a"), BLOCK, text(" b")), ("1", "2"),
    ),
    "verl, other roles": (
        {"prompt": [{"role": "system", "content": "s<image>"}, *user("<image>")], "images": ["1", "2"]},
        [{"role": "system", "content": [text("s"), BLOCK]}, *user(BLOCK)], ("1", "2"),
    ),
    "TRL": (
        {"prompt": [{"role": "system", "content": "s"}, *user("a"), {"role": "assistant", "content": "b"}, *user("c")],
         "images": ["1", "2"]},
        [{"role": "system", "content": "s"}, *user(BLOCK, BLOCK, text("a")), {"role": "assistant", "content": "b"},
         *user("c")], ("1", "2"),
    ),
    "TRL, one image": ({"prompt": user("a"), "image": "1"}, user(BLOCK, text("a")), ("1",)),
    "TRL, text in parts": ({"prompt": user(text("a")), "image": "1"}, user(BLOCK, text("a")), ("1",)),
    "plain text": ({"prompt": "a", "images": ["1"]}, user(BLOCK, text("a")), ("1",)),
    "plain text with places": ({"prompt": "a<image>", "images": ["1"]}, user(text("a"), BLOCK), ("1",)),
    "blocks filled in order": (
        {"prompt": user(text("a"), BLOCK, text("b"), {"type": "image", "text": None}), "images": ["1", "2"]},
        user(text("a"), BLOCK, text("b"), BLOCK), ("1", "2"),
    ),
    "own images": (
        {"prompt": user({"type": "image", "path": "1"}, {"type": "image_url", "image_url": {"url": "2"}}, text("a"))},
        user(BLOCK, BLOCK, text("a")), ({"path": "1"}, {"image_url": {"url": "2"}}),
    ),
    "own images and the column's": (
        {"prompt": user({"type": "image"}, {"type": "image", "image": "own"}, text("<image>a")), "images": ["1", "2"]},
        user(BLOCK, BLOCK, BLOCK, text("a")), ("1", {"image": "own"}, "2"),
    ),
    "bytes in a block": (
        {"prompt": user({"type": "image", "bytes": b"1", "path": "x"}, text("a"))}, user(BLOCK, text("a")),
        ({"bytes": b"1"},),
    ),
    "an image alone": ({"prompt": user(BLOCK), "images": ["1"]}, user(BLOCK), ("1",)),
    "no image": ({"prompt": user("a"), "images": [], "image": None}, user("a"), ()),
    "no image, text": ({"prompt": "a"}, "a", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_images_stand_where_the_row_says(name, data_config):
    row, messages, sources = PLACED[name]
    prompt = placed(row, data_config)
    assert (prompt.prompt if isinstance(prompt.prompt, str) else list(prompt.prompt)) == messages
    assert prompt.sources == sources


def test_a_column_of_another_name_is_read_where_the_setting_names_it(data_config):
    row = {"prompt": "a", "figure": {"bytes": b"1", "path": None}, "image": "thumbnail.png"}
    assert placed(row, data_config, key="figure").sources == (row["figure"],)
    with pytest.raises(DataError, match=r"row 3: column 'figure' holds images.*set data.images.key=figure, or drop it"):
        placed({**row, "image": None}, data_config)
    assert placed({"prompt": "a"}, data_config, key="figure").prompt == "a"


def image_file():
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "png")
    return file.getvalue()


REFUSED = {
    "more places": ({"prompt": user("<image><image>a"), "images": "1"}, "has 2 places .*column 'images' has 1 images"),
    "more images": ({"prompt": user("<image>a"), "images": ["1", "2"]}, "has 1 places .*column 'images' has 2 images"),
    "a place alone": ({"prompt": user("<image>a")}, "has 1 places .*column 'images' has 0 images"),
    "a place in plain text": ({"prompt": "<image>a", "image": []}, "has 1 places .*has 0 images"),
    "a block alone": ({"prompt": user(BLOCK, text("a"))}, "has 1 places .*has 0 images"),
    "own images besides": (
        {"prompt": user({"type": "image", "path": "1"}, text("a")), "image": "2"},
        "has 0 places .*besides 1 blocks with an image of their own, and column 'image' has 1 images",
    ),
    "an unknown field": (
        {"prompt": user({"type": "image", "data": "x"}, text("a"))}, "message 0, block 0 has a field 'data', which is"
    ),
    "both columns": ({"prompt": "a", "images": ["1"], "image": "2"}, "images and image both have images; name one"),
    "videos": ({"prompt": "a", "images": ["1"], "videos": ["2"]}, "column 'videos' holds video, sound or inputs"),
    "audio": ({"prompt": "a", "audio": {"array": numpy.ones(3)}}, "column 'audio' holds video, sound"),
    "inputs of a processor": ({"prompt": "a", "multi_modal_data": {"image": ["1"]}}, "column 'multi_modal_data' holds"),
    "another column": ({"prompt": "a", "shown": image_file()}, "column 'shown' holds images, and images and image are"),
    "<video>": ({"prompt": user("<video>a")}, "message 0 has <video>, the place of video or sound"),
    "<audio>": ({"prompt": "a<audio>"}, "has <audio>"),
    "a video block": ({"prompt": user({"type": "video", "video": "x"})}, "block 0 is of type 'video'"),
    "an audio block": ({"prompt": user({"type": "input_audio", "input_audio": "x"})}, "block 0 is of type 'input_"),
    "a placeholder": ({"prompt": user("<image>a<|image_pad|>"), "images": ["1"]}, r"text has '<\|image_pad\|>'"),
    "a placeholder in text": ({"prompt": "a<|image_pad|>"}, r"text has '<\|image_pad\|>', which would become"),
    "no user": ({"prompt": [{"role": "system", "content": "a"}], "images": ["1"]}, "1 images, and no message of"),
    "an image beside a message": ({"prompt": [{"role": "user", "content": "a", "images": ["1"]}]}, "in 'images'"),
    "an image beside text": ({"prompt": user({**text("a"), "image": "1"})}, "beside text"),
    "an empty message": ({"prompt": user(" "), "images": []}, "is empty"),
    "no messages": ({"prompt": [], "images": ["1"]}, "1 images, and no message of the user"),
    "no prompt": ({"images": ["1"]}, "no column 'prompt'"),
    "null": ({"prompt": None, "image": []}, r"empty \(null\)"),
    "unknown block": ({"prompt": user({"type": "table", "table": "x"})}, "content part"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_an_error_that_names_the_row(name, data_config):
    row, reason = REFUSED[name]
    with pytest.raises(DataError, match=rf"^f\.jsonl, row 3: .*{reason}"):
        placed(row, data_config)


def test_too_many_images_are_an_error(data_config):
    row = {"prompt": "a", "images": ["1", "2", "3"]}
    assert len(placed(row, data_config, max_per_prompt=3).sources) == 3
    with pytest.raises(DataError, match=r"has 3 images, more than data.images.max_per_prompt=2"):
        placed(row, data_config, max_per_prompt=2)


def test_the_identity_of_a_prompt_includes_its_images(data_config):
    one = placed({"prompt": "a b", "images": ["1"]}, data_config).prompt
    other = placed({"prompt": " a  <image>b", "images": ["1"]}, data_config).prompt
    assert identity(one, ["x"]) == identity(other, ["x"]) != identity(one, ["y"])
    assert identity(one) == identity("a b")
    assert identity(one, ["x", "y"]) != identity(one, ["y", "x"])


def test_a_row_is_not_changed(data_config):
    config = replace(DataImagesConfig())
    row = {"prompt": user("<image>a"), "images": ["1"]}
    read_image_prompt(row, data_config("f", images=config), (), HERE)
    assert row == {"prompt": user("<image>a"), "images": ["1"]}
