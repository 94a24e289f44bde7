"""Published datasets into verl's schema: what is read, what is dropped, what is written, and that rewards score it."""

import json
from types import SimpleNamespace

import datasets
import pyarrow.parquet
import pytest
import torch

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.data.convert import convert, output_files, write
from hwgrpo.data.dataset_files import open_copy
from hwgrpo.data.formats import read_file
from hwgrpo.data.prompts import build_dataset
from hwgrpo.data.published import PUBLISHED, published_with, reward_of
from hwgrpo.errors import DataError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.values import Completions, PromptBatch
from tests.support.runs.published_rows import GSM8K, GSM8K_TRUTHS, MATH, MATH_ANSWERS, write_jsonl


def converted(name, source, out, *, force=False, strict=False, instruction=None):
    """Do what `hwgrpo data NAME` does; return the files."""
    copy = open_copy(PUBLISHED[name], str(source))
    files = output_files(out, copy, force)
    write(files, convert(PUBLISHED[name], copy, instruction, strict))
    return files


def rows_of(file):
    return pyarrow.parquet.read_table(file).to_pylist()


@pytest.fixture
def gsm8k_folder(tmp_path):
    folder = tmp_path / "copy"
    write_jsonl(folder / "train.jsonl", GSM8K[:7])
    write_jsonl(folder / "test.jsonl", GSM8K[7:])
    return folder


@pytest.fixture
def math_folder(tmp_path):
    folder = tmp_path / "copy"
    write_jsonl(folder / "train.jsonl", MATH[:6])
    write_jsonl(folder / "test.jsonl", MATH[6:])
    return folder


def score(dataset, reward, texts):
    """Score one response to each prompt as the trainer does; returns one number per prompt."""
    entry = RewardFunctionConfig(reward)
    batch = PromptBatch(tuple(dataset.prompt(row, 0) for row in range(len(dataset))))
    size = len(texts)
    completions = Completions(
        prompt_index=torch.arange(size),
        tokens=torch.zeros(size, dtype=torch.int64),
        offsets=torch.arange(size + 1),
        logprobs=torch.zeros(size),
        finished=torch.ones(size, dtype=torch.bool),
        texts=tuple(texts),
    )
    return RewardPipeline(SimpleNamespace(functions=[entry])).score(batch, completions).total.tolist()


@pytest.mark.parametrize(
    ("name", "wrong", "truths"), [("gsm8k", "#### 7", GSM8K_TRUTHS[:7]), ("math", "\\boxed{123}", MATH_ANSWERS[:6])]
)
def test_the_trainer_reads_what_was_written_and_the_reward_tells_right_from_wrong(
    name, wrong, truths, request, tmp_path, data_config, tokenizer
):
    files = converted(name, request.getfixturevalue(f"{name}_folder"), tmp_path / "out")
    dataset = build_dataset(data_config(files["train"], max_prompt_tokens=400), tokenizer, "train")
    assert [dataset.prompt(row, 0).ground_truth for row in range(len(dataset))] == truths
    prompt = dataset.prompt(0, 0)
    assert prompt.source == PUBLISHED[name].hub
    assert prompt.text.endswith(PUBLISHED[name].instruction + "\n<assistant>")
    reward = PUBLISHED[name].reward
    solutions = [dataset.prompt(row, 0).columns["extra_info"]["answer"] for row in range(len(dataset))]
    assert score(dataset, reward, solutions) == [1.0] * len(truths)
    assert score(dataset, reward, [wrong] * len(truths)) == [0.0] * len(truths)
    assert score(dataset, reward, [""] * len(truths)) == [0.0] * len(truths)


def test_rows_are_in_verls_schema(gsm8k_folder, tmp_path):
    files = converted("gsm8k", gsm8k_folder, tmp_path / "out")
    assert rows_of(files["test"])[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{
            "role": "user",
            "content": GSM8K[8]["question"]
            + ' Let\'s think step by step and output the final answer after "####".',
        }],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "560"},
        "extra_info": {"split": "test", "index": 1, "answer": GSM8K[8]["answer"], "question": GSM8K[8]["question"]},
    }  # fmt: skip
    assert (len(rows_of(files["train"])), len(rows_of(files["test"]))) == (7, 3)


def test_the_instruction_can_be_another_or_none(gsm8k_folder, tmp_path):
    for instruction, expected in (("Answer briefly.", " Answer briefly."), ("", "")):
        files = converted("gsm8k", gsm8k_folder, tmp_path / "out", force=True, instruction=instruction)
        assert rows_of(files["train"])[0]["prompt"][0]["content"] == GSM8K[0]["question"] + expected


@pytest.mark.parametrize("kind", ["parquet", "json", "save_to_disk"])
def test_every_form_of_a_local_copy_gives_the_same_rows(kind, gsm8k_folder, tmp_path):
    expected = {split: rows_of(file) for split, file in converted("gsm8k", gsm8k_folder, tmp_path / "a").items()}
    folder = tmp_path / "other"
    folder.mkdir()
    splits = {"train": GSM8K[:7], "test": GSM8K[7:]}
    if kind == "save_to_disk":
        datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}).save_to_disk(
            str(folder)
        )
    for split, rows in splits.items() if kind != "save_to_disk" else ():
        file = folder / f"{split}-00000-of-00001.{kind}"
        if kind == "json":
            file.write_text(json.dumps(rows))
        else:
            datasets.Dataset.from_list(rows).to_parquet(file)
    assert {split: rows_of(file) for split, file in converted("gsm8k", folder, tmp_path / "b").items()} == expected


def test_other_subsets_versions_and_files_of_a_copy_are_left_aside_and_named(gsm8k_folder):
    hub = gsm8k_folder / "hub"
    for subset in ("main", "socratic"):
        write_jsonl(hub / subset / "train-00000-of-00001.jsonl", GSM8K[: 3 if subset == "main" else 5])
    copy = open_copy(PUBLISHED["gsm8k"], str(hub))
    assert [len(part.rows) for part, _ in copy.splits["train"]] == [3]
    assert copy.skipped == {"of another subset": ["socratic/train-00000-of-00001.jsonl"]}

    release = gsm8k_folder / "release"
    for name in ("train.jsonl", "test.jsonl", "train_socratic.jsonl", "example_model_solutions.jsonl", "val.jsonl"):
        write_jsonl(release / name, GSM8K[:2])
    copy = open_copy(PUBLISHED["gsm8k"], str(release))
    assert {split: [part.name for part, _ in parts] for split, parts in copy.splits.items()} == {
        "train": [str(release / "train.jsonl")],
        "test": [str(release / "test.jsonl")],
    }
    assert copy.skipped == {
        "another version": ["train_socratic.jsonl"],
        "names no split": ["example_model_solutions.jsonl"],
        "of the split validation": ["val.jsonl"],
    }
    only = open_copy(PUBLISHED["gsm8k"], str(hub / "socratic"))
    assert [len(part.rows) for part, _ in only.splits["train"]] == [5]


def test_maths_first_release_has_a_file_for_every_row(tmp_path):
    for number, row in enumerate(MATH):
        file = tmp_path / "MATH" / ("train" if number < 6 else "test") / "algebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row))
    files = converted("math", tmp_path / "MATH", tmp_path / "out")
    truths = [row["reward_model"]["ground_truth"] for split in ("train", "test") for row in rows_of(files[split])]
    assert truths == MATH_ANSWERS


def test_rows_that_cannot_be_converted_are_counted_and_named_and_the_others_keep_their_index(tmp_path):
    rows = [
        GSM8K[0], "{broken", {"question": "", "answer": "#### 3"}, {"question": "Why?", "answer": "no mark"},
        {"question": "Who?"}, {"question": "How?", "answer": 12}, "[1]", GSM8K[1],
    ]  # fmt: skip
    file = write_jsonl(tmp_path / "train.jsonl", rows)
    done = convert(PUBLISHED["gsm8k"], open_copy(PUBLISHED["gsm8k"], str(file)), None, strict=False)["train"]
    assert done.read == 8
    assert [row["extra_info"]["index"] for row in done.rows] == [0, 7]
    assert [(each.place.rpartition(", ")[2], each.reason.split(" (")[0]) for each in done.dropped] == [
        ("line 2", "not valid JSON"),
        ("line 3", "'question' is empty"),
        ("line 4", "no ####"),
        ("line 5", "'answer' is missing"),
        ("line 6", "'answer' is no text"),
        ("line 7", 'a row must be a JSON object such as {"prompt": ...}, this is a list'),
    ]
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: not valid JSON .*and 5 more of train.*--strict"):
        converted("gsm8k", file, tmp_path / "out", strict=True)
    assert not (tmp_path / "out").exists()


def test_a_text_in_parquet_that_is_not_utf8_is_a_row_that_cannot_be_converted(tmp_path):
    import pyarrow

    binary = {"question": pyarrow.array([b"fine?", b"b\xffd?"]), "answer": pyarrow.array([b"#### 1", b"#### 2"])}
    columns = {name: array.view(pyarrow.string()) for name, array in binary.items()}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    copy = open_copy(PUBLISHED["gsm8k"], str(tmp_path / "train.parquet"))
    done = convert(PUBLISHED["gsm8k"], copy, None, strict=False)["train"]
    assert len(done.rows) == 1
    assert done.dropped[0].place.endswith("row 1")
    assert "not UTF-8" in done.dropped[0].reason


def test_files_are_never_written_over_unasked_and_a_failure_changes_nothing(gsm8k_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    files = converted("gsm8k", gsm8k_folder / "train.jsonl", out)
    assert set(files) == {"train"}
    converted("gsm8k", gsm8k_folder / "test.jsonl", out)  # the other split goes beside it
    before = {file: file.read_bytes() for file in out.iterdir()}
    assert len(before) == 2
    with pytest.raises(DataError, match=r"train\.parquet and .*test\.parquet exist; --force"):
        converted("gsm8k", gsm8k_folder, out)
    write_table, written = pyarrow.parquet.write_table, []

    def full_disk(table, file):
        write_table(table, file)
        written.append(table)
        if len(written) == 2:
            raise OSError("No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full_disk)
    with pytest.raises(DataError, match=r"cannot be written \(No space left"):
        converted("gsm8k", gsm8k_folder, out, force=True, instruction="Other.")
    assert {file: file.read_bytes() for file in out.iterdir()} == before
    monkeypatch.undo()
    converted("gsm8k", gsm8k_folder, out, force=True, instruction="Other.")
    assert {file.name for file in out.iterdir()} == {"train.parquet", "test.parquet"}
    assert all(row["prompt"][0]["content"].endswith(" Other.") for row in rows_of(out / "train.parquet"))


def test_a_source_is_never_written_over(gsm8k_folder):
    raw = gsm8k_folder / "raw"
    raw.mkdir()
    datasets.Dataset.from_list(GSM8K).to_parquet(raw / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet there is one of the files to read"):
        converted("gsm8k", raw, raw, force=True)


@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    [
        ("math", GSM8K, ["no column 'problem'", "there are: question, answer"]),
        ("gsm8k", [{"data_source": "x", "prompt": [], "reward_model": {}}], ["has been converted already"]),
        ("gsm8k", [{"question": "q", "answer": "a"}] * 3, ["none of the 3 rows of train", "line 1: no ####"]),
    ],
)
def test_another_dataset_is_an_error_and_not_thousands_of_dropped_rows(name, rows, parts, tmp_path):
    file = write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as error:
        converted(name, file, tmp_path / "out")
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    ("spec", "called"),
    [
        (None, ("openai/gsm8k", "main")),
        ("openai/gsm8k", ("openai/gsm8k", "main")),
        ("openai/gsm8k:socratic", ("openai/gsm8k", "socratic")),
        ("somebody/like-gsm8k", ("somebody/like-gsm8k", None)),
    ],
)
def test_the_hub_is_asked_for_the_dataset_and_its_subset(spec, called, monkeypatch, tmp_path):
    calls = []

    def load_dataset(*words, revision):
        calls.append(words)
        assert revision is None
        rows = datasets.Dataset.from_list(GSM8K)
        return datasets.DatasetDict({"train": rows, "test": rows.select(range(2)), "extra": rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    copy = open_copy(PUBLISHED["gsm8k"], spec)
    assert calls == [called]
    assert copy.skipped == {"another split": ["extra"]}
    done = convert(PUBLISHED["gsm8k"], copy, None, strict=True)
    assert [row["reward_model"]["ground_truth"] for row in done["train"].rows] == GSM8K_TRUTHS[2:]
    assert len(done["test"].rows) == 2


def test_without_a_network_the_error_says_what_to_download_and_how_to_name_it(monkeypatch):
    def load_dataset(*words, revision):
        raise ConnectionError("Couldn't reach the Hub.\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for dataset in PUBLISHED.values():
        with pytest.raises(DataError) as error:
            open_copy(dataset, None)
        for part in ("Couldn't reach the Hub", *dataset.files, dataset.page, "--source FOLDER", "HF_ENDPOINT"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def test_published_datasets_are_known_by_their_columns_and_sources():
    assert published_with(("question", "answer", "more")) == "gsm8k"
    assert published_with(("problem", "solution")) == "math"
    assert published_with(("prompt", "answer")) is None
    assert (reward_of("openai/gsm8k"), reward_of("mine")) == ("gsm8k", None)


def test_broken_rows_are_raised_unless_somebody_takes_note(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", ['{"prompt": "a"}', "{", '{"prompt": "b"}'])
    table = tmp_path / "b.json"
    table.write_text('[{"prompt": "a"}, 7, {"prompt": "b"}]')
    for file, place in ((lines, "line 2"), (table, "row 1")):
        with pytest.raises(DataError, match=place):
            read_file(file)
        broken = {}
        part = read_file(file, broken)
        assert [row.get("prompt") for row in part.rows] == ["a", None, "b"]
        assert list(broken) == [1]
        assert place in str(broken[1])
        assert place in part.place(1)
