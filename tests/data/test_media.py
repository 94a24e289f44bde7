"""Rows with images, video or sound beside their text are refused by every reader; empty columns are read."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hwgrpo.config.schema import RewardModelConfig
from hwgrpo.data.convert import convert
from hwgrpo.data.examples import build_examples
from hwgrpo.data.given_rows import part_of
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.media import MARK, is_media
from hwgrpo.data.own_files import open_files, own_conversion
from hwgrpo.data.prompts import build_dataset, dataset_notes
from hwgrpo.data.raw_rows import own_columns
from hwgrpo.data.sources import open_rows
from hwgrpo.errors import DataError
from hwgrpo.research.scored_examples import build_scored
from hwgrpo.trl.trl_datasets import longest_prompt

ROW = {"prompt": "what is this?", "answer": "7", "response": "a", "reward": 1.0}
CHAT = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "a"}]


def png():
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "png")
    return file.getvalue()


FILLED = [
    ("images", ["x.png"]), ("image", "x.png"), ("Image", {"bytes": b"x", "path": None}), ("videos", [{"url": "v"}]),
    ("video", b"\x00"), ("audio", {"array": numpy.zeros(3)}), ("audios", [[0.5]]), ("image_url", "https://x/y.png"),
    ("multi_modal_data", {"image": ["x.png"]}), ("images", numpy.ones(2)), ("image", 5),
    ("picture", png()), ("shown", [{"bytes": png(), "path": "x.png"}]), ("figure", "data:image/png;base64,AAAA"),
    ("drawing", Image.new("RGB", (2, 2))),
]  # fmt: skip
EMPTY = [
    ("images", None), ("images", []), ("image", ""), ("video", float("nan")), ("audio", {"bytes": None, "path": None}),
    ("multi_modal_data", {"image": []}), ("images", [None, ""]), ("image", False), ("audio", numpy.zeros(0)),
    ("image_size", 3), ("imagery", "a forest"), ("shown", {"bytes": None, "path": None}), ("picture", "a.png"),
    ("bytes", b"text"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FILLED)
def test_a_filled_column_of_images_video_or_sound_is_known_by_its_name_or_value(name, value):
    assert is_media(name, value)


@pytest.mark.parametrize(("name", "value"), EMPTY)
def test_a_column_without_content_or_of_another_name_is_none(name, value):
    assert not is_media(name, value)


def reads(path: Path, data_config, tokenizer):
    """Return the readers of a file's rows, of which each must refuse a picture."""
    config = data_config(path)
    scored = SimpleNamespace(
        data=config,
        rollout=SimpleNamespace(max_response_tokens=64),
        reward_model=RewardModelConfig(loss="mse", score_key="reward"),
    )
    return {
        "train": lambda: build_dataset(config, tokenizer, "train"),
        "validation": lambda: build_dataset(data_config("task://sort", validation=str(path)), tokenizer, "validation"),
        "sft": lambda: build_examples(config, tokenizer, [2], 64, "train"),
        "reward-model": lambda: build_scored(scored, tokenizer, 256, "train"),
        "convert": lambda: own_columns("prompt", None)(open_rows(str(path), "train", "FILE")[0]),
        "TRL": lambda: longest_prompt([list(open_rows(str(path), "train", "FILE"))], tokenizer, {}),
    }


DOORS = ("train", "validation", "sft", "reward-model", "convert", "TRL")


@pytest.mark.parametrize("door", DOORS)
def test_every_reader_names_the_filled_column_and_reads_the_row_where_it_is_empty(door, jsonl, data_config, tokenizer):
    path = jsonl([ROW | {"images": ["x.png"]}])
    with pytest.raises(DataError, match=r"column 'images' holds images, video or sound.*drop it where"):
        reads(path, data_config, tokenizer)[door]()
    for empty in (None, [], [None]):
        reads(jsonl([ROW | {"images": empty}]), data_config, tokenizer)[door]()


def test_a_conversation_alone_is_refused_for_the_column_beside_it(jsonl, data_config, tokenizer):
    path = jsonl([{"messages": CHAT, "images": ["x.png"]}])
    with pytest.raises(DataError, match=r"line 1: column 'images'"):
        build_examples(data_config(path), tokenizer, [2], 64, "train")


def test_an_inspection_counts_such_a_row_as_bad_and_a_mark_in_the_text_as_none(jsonl, data_config):
    path = jsonl([ROW | {"prompt": f"{n} <image>", "images": ["x.png"] if n == 1 else []} for n in range(3)])
    report = inspect_files([str(path)], Settings(data_config(path), None, None, 0)).files[0]
    assert [each.place for each in report.bad] == [f"{path}, line 2"]
    assert report.bad[0].reason.startswith("column 'images' holds images")
    assert report.findings == {"marked": 2}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content part"),
        ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}, "content part"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}, "content part"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "image": "x.png"}]}, "part of the content holds"),
        ({"role": "user", "content": "a", "images": ["x.png"]}, "message 0 holds images, video or sound in 'images'"),
    ],
)
def test_messages_with_images_beside_their_text_are_refused(message, reason, jsonl, data_config, tokenizer):
    with pytest.raises(DataError, match=rf"line 1: .*message 0.*{reason.removeprefix('message 0 ')}"):
        build_dataset(data_config(jsonl([{"prompt": [message]}])), tokenizer, "train")


def test_null_fields_of_a_tables_content_parts_are_no_images(tmp_path, data_config, tokenizer):
    part = {"type": "text", "text": "hi", "image": None}
    path = tmp_path / "parts.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": [{"role": "user", "content": [part]}], "images": []}]), path
    )
    assert list(build_dataset(data_config(path, chat="never"), tokenizer, "train").texts) == ["hi"]


def test_a_dataset_of_pictures_is_refused_without_decoding_them(monkeypatch):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "shown": datasets.List(datasets.Image()), "drawn": datasets.Image()}
    )
    rows = [
        {"prompt": "a", "shown": [{"bytes": b"no picture", "path": None}], "drawn": None},
        {"prompt": "b", "shown": [], "drawn": {"bytes": b"none either", "path": None}},
        {"prompt": "c", "shown": [], "drawn": None},
    ]
    part = part_of(datasets.Dataset.from_list(rows, features=features), "object://rows", "data.train")
    assert len(part.rows) == 3
    assert [is_media("shown", row["shown"]) for row in part.rows] == [True, False, False]
    assert [is_media("drawn", row["drawn"]) for row in part.rows] == [False, True, False]


def test_the_mark_of_an_image_in_the_text_alone_is_counted_and_said(jsonl, data_config, tokenizer):
    rows = [{"prompt": "<image> what?"}, {"prompt": [{"role": "user", "content": "<|image_pad|>"}]}, {"prompt": "a"}]
    data = build_dataset(data_config(jsonl(rows), chat="never"), tokenizer, "train")
    notes = list(dataset_notes("training", data))
    assert len(data) == 3
    assert notes[-1].startswith("2 training prompts have the mark of an image, video or sound in their text")
    examples = build_examples(data_config(jsonl([ROW | {"prompt": "<image> what?"}])), tokenizer, [2], 64, "train")
    assert examples.findings == {"marked": 1}


@pytest.mark.parametrize("text", ["<img src='a'>", "an image", "<images of us>", "a < image > b", "<p>"])
def test_text_that_speaks_of_images_has_no_mark(text):
    assert not MARK.search(text)


def test_conversion_of_own_files_drops_rows_with_images(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(ROW | {"images": images}) + "\n" for images in ([], ["x.png"])))
    done = convert(own_conversion("rows", "prompt", None, None, "rows"), open_files([str(file)]), None, False)
    assert [each.place for each in done["train"].dropped] == [f"{file}, line 2"]
    assert "'images' holds images" in done["train"].dropped[0].reason
