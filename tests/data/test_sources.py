import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.config import load_config
from hwgrpo.data.sources import find_data, open_all, open_rows
from hwgrpo.errors import ConfigError, DataError

ROWS = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}, {"prompt": "three", "answer": "3"}]


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def write_parquet(path, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def read(path, split="train", key="data.train"):
    return open_rows(str(path), split, key)


def write_as(kind, folder):
    """Write ROWS in one of the formats, and return the path that names them."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    elif kind == "json":
        write_json(path, ROWS)
    elif kind == "data.json":
        write_json(path, {"version": 1, "data": ROWS})
    elif kind == "parquet":
        write_parquet(path)
    elif kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "saved_splits":
        data = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(path)
    else:
        path.mkdir()
        write_json(path / "a.json", ROWS[:1])
        write_parquet(path / "b.parquet", ROWS[1:])
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "data.json", "parquet", "saved", "saved_splits", "folder"])
def test_every_format_gives_the_same_rows(kind, tmp_path):
    rows = read(write_as(kind, tmp_path))
    assert [dict(rows[index]) for index in range(len(rows))] == ROWS
    assert rows.columns == ("prompt", "answer")


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    rows = read(path)
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows.place(1) == f"{path}, line 3"


def test_a_place_names_the_file_of_the_row_in_a_folder_of_several(tmp_path):
    folder = write_as("folder", tmp_path)
    rows = read(folder)
    assert rows.place(0) == f"{folder / 'a.json'}, row 0"
    assert rows.place(2) == f"{folder / 'b.parquet'}, row 1"
    assert (rows.source(0), rows.source(2)) == ("a.json", "b.parquet")


def test_a_split_is_chosen_by_file_names(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[1:2])
    write_parquet(tmp_path / "data" / "dev-00000-of-00001.parquet", ROWS[2:])
    assert [row["prompt"] for row in read(tmp_path)] == ["one", "two"]
    assert [row["prompt"] for row in read(tmp_path, "validation")] == ["three"]


@pytest.mark.parametrize("kind", ["saved_splits", "files"])
def test_a_split_that_a_folder_lacks_is_refused_with_those_it_has(kind, tmp_path):
    folder = tmp_path
    if kind == "files":
        write_json(tmp_path / "train.json", ROWS)
        write_json(tmp_path / "test.json", ROWS)
    else:
        folder = write_as(kind, tmp_path)
    with pytest.raises(DataError, match=r"data.validation_split='validation'.*it has: test, train"):
        read(folder, "validation", "data.validation")


def test_a_task_address_opens_the_split_of_the_task():
    rows = read("task://sort", "validation")
    assert set(rows.columns) == {"prompt", "ground_truth", "data_source"}
    assert rows.place(3) == "task://sort, row 3"
    assert len(rows) == 1000


def test_an_unknown_task_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'sort'"):
        read("task://srot")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n', ["a.jsonl, line 2", "not UTF-8", "0xe9", "iconv"]),
        ("a.json", b'[{"prompt": "x"},\n{"prompt": "caf\xe9"}]\n', ["a.json, line 2", "not UTF-8", "0xe9"]),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": "y"\n', ["a.jsonl, line 3", "not valid JSON", "one complete JSON"]),
        ("a.json", b'[{"prompt": "x"},\n{"prompt" "y"}]', ["a.json, line 2", "not valid JSON"]),
        ("a.json", b'{"prompt": "x"}\n{"prompt": "y"}', ["a.json, line 2", "name it .jsonl"]),
        ("a.jsonl", b'{"prompt": "x"}\n["y"]\n', ["a.jsonl, line 2", "must be a JSON object", "a list"]),
        ("a.json", b'[{"prompt": "x"}, "y"]', ["a.json, row 1", "must be a JSON object", "a text"]),
        ("a.json", b'{"rows": []}', ["a.json", '{"data": [...]}', "an object"]),
        ("a.jsonl", b"\n\n", ["a.jsonl", "has no rows"]),
        ("a.json", b"", ["a.json", "empty"]),
        ("a.json", b"[]", ["a.json", "has no rows"]),
        ("a.parquet", b"", ["a.parquet", "empty"]),
        ("a.parquet", b"PAR1 this is not one", ["a.parquet", "truncated, damaged or not a Parquet file"]),
        ("a.txt", b"prompt\nx\n", ["a.txt", ".txt is not a data file", ".jsonl, .json, .parquet, .csv"]),
        ("a.csv", b"prompt,answer\nx,1\n\ny,1,2\n", ["a.csv, line 4", "3 values for 2 columns", "quote"]),
        ("a.csv", b"prompt,prompt\nx,1\n", ["a.csv, line 1", "two columns have the name 'prompt'"]),
        ("a.csv", b"prompt\n", ["a.csv", "has no rows"]),
        ("a.csv", b"", ["a.csv", "has no rows"]),
        ("a.tsv", b"prompt\nx\ncaf\xe9\n", ["a.tsv, line 3", "not UTF-8"]),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100_000, ["a.jsonl, line 1", "nested too deeply"]),
        ("a.json", b'[{"prompt": "x", "n": ' + b"9" * 5000 + b"}]", ["a.json", "more than 4300 digits", "as text"]),
        ("a.jsonl", '{"prompt": "x"}'.encode("utf-16"), ["a.jsonl, line 1", "not UTF-8", "iconv"]),
    ],
)
def test_a_malformed_file_is_refused_with_file_line_and_remedy(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.95])
def test_a_truncated_parquet_is_refused_wherever_it_was_cut(cut, tmp_path):
    path = tmp_path / "whole.parquet"
    write_parquet(path, [{"prompt": f"number {i}"} for i in range(200)])
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(DataError, match=r"whole\.parquet: truncated, damaged"):
        read(path)


def test_a_parquet_with_damaged_pages_is_refused(tmp_path):
    path = tmp_path / "pages.parquet"
    table = pyarrow.table({"prompt": [f"number {i}" for i in range(2000)]})
    pyarrow.parquet.write_table(table, path, write_page_checksum=True, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pages\.parquet: truncated, damaged"):
        read(path)


def test_text_in_a_parquet_that_is_not_utf8_is_told_with_its_row(tmp_path):
    path = tmp_path / "latin.parquet"
    raw = pyarrow.array([b"good", b"caf\xe9"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    rows = read(path)
    assert rows[0] == {"prompt": "good"}
    with pytest.raises(DataError, match=r"latin\.parquet, row 1: not UTF-8"):
        rows[1]


def test_csv_has_text_in_its_columns_and_places_by_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbfprompt,answer,reward_model.ground_truth\r\n"one,\r\ntwo",1,7\r\n\r\n"a ""b""",2,8\r\n'
    )
    rows = read(path)
    assert rows.columns == ("prompt", "answer", "reward_model.ground_truth")
    assert [row["prompt"] for row in rows] == ["one,\r\ntwo", 'a "b"']
    assert [rows.place(index) for index in range(2)] == [f"{path}, line 2", f"{path}, line 5"]
    (tmp_path / "b.tsv").write_text("prompt\tanswer\na,b\t1\n" + "x" * 200_000 + "\t2\n")  # longer than csv's own limit
    assert [len(row["prompt"]) for row in read(tmp_path / "b.tsv")] == [3, 200_000]


def test_a_folder_with_csv_beside_other_formats_is_refused_with_both_names(tmp_path):
    write_json(tmp_path / "a.json", ROWS)
    (tmp_path / "labels.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"holds labels.csv beside a.json.*data.train=\[.*a.json,.*labels.csv\]"):
        read(tmp_path)
    (tmp_path / "a.json").unlink()
    assert len(read(tmp_path)) == 1


def test_several_files_are_read_in_order_whatever_their_formats(tmp_path):
    write_json(tmp_path / "a.json", ROWS)
    (tmp_path / "b.csv").write_text("prompt,answer\nx,1\ny,2\n")
    rows = open_all([str(tmp_path / "b.csv"), str(tmp_path / "a.json"), "task://sort?digits=2"], "test", "train")
    assert [row["prompt"] for row in rows][:3] == ["x", "y", ROWS[0]["prompt"]]
    assert rows.place(1) == f"{tmp_path}/b.csv, line 3"
    assert rows.source(2) == "a.json"
    with pytest.raises(DataError, match=r"data.train='.*/c.csv': no such file"):
        open_all([str(tmp_path / "a.json"), str(tmp_path / "c.csv")], "train", "train")


def test_a_missing_file_is_refused_with_the_nearest_one_there(tmp_path):
    write_json(tmp_path / "train.json", ROWS)
    with pytest.raises(
        DataError, match=r"data.train='.*trian.json': no such file or folder. Did you mean .*train.json\?"
    ):
        read(tmp_path / "trian.json")


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(DataError, match=r"has no data files \(\.jsonl, \.json, \.parquet, \.csv, \.tsv, \.gz\)"):
        read(tmp_path)


def test_a_damaged_dataset_folder_is_refused(tmp_path):
    folder = write_as("saved", tmp_path)
    next(folder.glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="damaged dataset folder"):
        read(folder)


def test_a_hub_dataset_that_cannot_be_loaded_names_setting_and_remedy(monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(DataError) as caught:
        read("nobody/no-such-dataset-of-ours")
    words = ["data.train='nobody/no-such-dataset-of-ours'", "split 'train'", "owner/name:subset", "save_to_disk"]
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_hub_name_is_loaded_with_its_subset_and_split(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read("openai/gsm8k:main", "test")
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert (len(rows), rows.source(0)) == (3, "openai/gsm8k")


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("data/train.jsno", "data/train.jsonl"),
        ("dta/train.jsonl", "data/train.jsonl"),
        ("data/train", "data/train.jsonl"),
        ("Data", "data"),
        ("data/train.csv", "data/train.jsonl"),
    ],
)
def test_a_name_that_differs_a_little_from_what_is_here_is_no_hub_name(spec, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_json(tmp_path / "data/train.jsonl", ROWS)
    with pytest.raises(DataError, match=f"no such file or folder. Did you mean {meant}\\?"):
        find_data(spec, "data.train")


def test_a_hub_name_is_left_alone_beside_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    write_json(tmp_path / "gsm8k.jsonl", ROWS)
    write_json(tmp_path / "openai/other.jsonl", ROWS)
    for name in ("gsm8k", "openai/gsm8k:main", "nobody/train", "bigcode/the-stack-v1.2"):
        assert find_data(name, "data.train") is None


def test_a_task_of_a_package_that_is_missing_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    address = "reasoning_gym://chain_sum?size=3&seed=12345"
    with pytest.raises(ConfigError, match=r'seed=12345 needs the package reasoning-gym .*pip install "hwgrpo\[reason'):
        read(address)
    recipe = ["model.path=builtin://tiny", f"data.train={address}", "reward.functions=[reasoning_gym]"]
    with pytest.raises(ConfigError, match=r"data.train=reasoning_gym://chain_sum.* needs the package reasoning-gym"):
        load_config(None, recipe)
    load_config(None, recipe, data_may_be_missing=True)
