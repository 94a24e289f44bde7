"""Geometry3K as it is published becomes rows of verl's columns, with their images as bytes."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.convert import convert, output_files, write
from hwgrpo.data.dataset_files import open_copy
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.prompts import build_dataset
from hwgrpo.data.published import PUBLISHED, published_with, reward_of
from tests.support.models.tiny_image_prompts import SHOWN, picture

GEO3K = PUBLISHED["geo3k"]
VERL = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    r"reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \boxed{}."
)


def problem(number, *files, text="<image>Find x."):
    files = files or (picture(8, 8 + number),)
    return {"problem": text, "answer": str(number), "images": [{"bytes": file, "path": None} for file in files]}


def published(folder, **splits):
    """Write splits as the hub stores them."""
    for split, rows in splits.items():
        file = folder / "data" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return open_copy(GEO3K, str(folder))


def test_rows_get_verls_columns_and_keep_the_bytes_of_images(tmp_path, data_config, seeing_tokenizer, seeing):
    copy = published(tmp_path, train=[problem(n) for n in range(3)], test=[problem(7)])
    files = output_files(tmp_path / "out", copy, force=False)
    write(files, convert(GEO3K, copy, None, strict=True))
    table = pyarrow.parquet.read_table(files["train"])
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info", "images"]
    assert table.to_pylist()[1] == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find x.{VERL}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": 1, "answer": "1", "question": "<image>Find x."},
        "images": [{"bytes": picture(8, 9), "path": None}],
    }
    assert sorted(files) == ["test", "train"]
    config = data_config(files["train"], max_prompt_tokens=400)
    data = build_dataset(config, seeing_tokenizer, "train", None, seeing)
    assert data.prompt(0, 0).text == f"<user>{SHOWN}Find x.{VERL}\n<assistant>"
    assert reward_of(data.prompt(0, 0).source) == "geo3k"
    settings = Settings(DataConfig(train=""), None, None, 0, with_images=True)
    (report,) = inspect_files([str(files["train"])], settings).files
    assert (report.bad, report.repeats, report.images.per_row) == ([], [], {1: 3})
    assert [(each.reward, each.scored) for each in report.judged] == [("geo3k", 3)]


def test_a_problem_without_places_gets_them_before_its_text(tmp_path):
    (row,) = convert(GEO3K, published(tmp_path, train=[problem(1, text="Find y.")]), "", strict=True)["train"].rows
    assert row["prompt"][0]["content"] == "<image>Find y."


def test_the_same_question_about_the_same_image_alone_is_a_repeat(tmp_path):
    rows = [problem(1), problem(2), problem(1), problem(3)]
    done = convert(GEO3K, published(tmp_path, train=rows, test=[problem(3)]), None, strict=True)["train"]
    assert [row["reward_model"]["ground_truth"] for row in done.rows] == ["1", "2"]
    counts = {reason: places.count for reason, places in done.repeated.items()}
    assert counts == {"repeats an earlier row": 1, "has a prompt of test": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (problem(1, picture()[:50]), "image 1 is broken or truncated"),
        (problem(1, picture(), picture()), "the problem has 1 times <image>, and the row has 2 images"),
        ({**problem(1), "images": []}, "'images' is empty"),
        ({**problem(1), "images": [{"bytes": None, "path": "a.png"}]}, "an image without bytes; read the dataset's"),
    ],
)
def test_a_row_that_cannot_be_shown_is_dropped_with_its_reason(row, reason, tmp_path):
    copy = published(tmp_path, train=[problem(0), row])
    (dropped,) = convert(GEO3K, copy, None, strict=False)["train"].dropped
    assert dropped.place.endswith("row 1")
    assert reason in dropped.reason


def test_the_hubs_dataset_is_read_without_decoding_and_its_columns_are_known(monkeypatch):
    features = {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    table = datasets.Dataset.from_list([problem(1)], features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, revision: datasets.DatasetDict({"train": table}))
    (row,) = convert(GEO3K, open_copy(GEO3K, None), None, strict=True)["train"].rows
    assert row["images"] == [{"bytes": picture(8, 9), "path": None}]
    assert published_with(tuple(features)) == "geo3k"
