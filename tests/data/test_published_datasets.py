"""Every published dataset besides GSM8K and MATH, on rows made up in its documented columns."""

import gzip
import json

import datasets
import pyarrow.parquet
import pytest

from hwgrpo.catalog import REWARDS
from hwgrpo.config.schema import DataConfig
from hwgrpo.data.convert import convert, output_files, write
from hwgrpo.data.dataset_files import open_copy
from hwgrpo.data.inspection import Settings, inspect_files
from hwgrpo.data.prompts import build_dataset
from hwgrpo.data.published import PUBLISHED, published_with, reward_of
from hwgrpo.data.row_schema import read_prompt
from hwgrpo.errors import DataError
from hwgrpo.sandbox.unit_tests import read_tests
from tests.support.runs.dataset_rows import (
    HH_RLHF,
    LOGIQA,
    MBPP_SANITIZED,
    OPTIONS,
    RECLOR,
    ROWS,
    TRIVIA_QA,
    dapo,
    pair,
)
from tests.support.runs.published_rows import write_jsonl


def convert_rows(name, rows, folder, *, strict=True, keep=False):
    """Convert rows of a dataset's first split; return what was converted."""
    copy = open_copy(PUBLISHED[name], str(write_jsonl(folder / f"{PUBLISHED[name].splits[0]}.jsonl", rows)))
    return convert(PUBLISHED[name], copy, None, strict, keep)[PUBLISHED[name].splits[0]]


def example(name, row, folder):
    return convert_rows(name, [row], folder).rows[0]


def truth(row):
    return row["reward_model"]["ground_truth"]


def reason(name, row, folder):
    """Return why a row is dropped."""
    with pytest.raises(DataError) as error:
        convert_rows(name, [row], folder)
    return str(error.value)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub"])
@pytest.mark.parametrize("name", ROWS)
def test_every_dataset_is_read_by_the_trainer_from_every_source(
    name, form, tmp_path, data_config, tokenizer, monkeypatch
):
    split = PUBLISHED[name].splits[0]
    table = datasets.Dataset.from_list(ROWS[name])
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, revision: datasets.DatasetDict({split: table}))
    source = None
    if form == "jsonl":
        source = str(write_jsonl(tmp_path / f"{split}.jsonl", ROWS[name]))
    elif form == "parquet":
        source = str(tmp_path / f"{split}-00000-of-00001.parquet")
        table.to_parquet(source)
    copy = open_copy(PUBLISHED[name], source)
    files = output_files(tmp_path / "out", copy, force=False)
    write(files, convert(PUBLISHED[name], copy, None, strict=True))
    dataset = build_dataset(data_config(files[split], max_prompt_tokens=2000), tokenizer, "train")
    assert dataset is not None
    assert len(dataset) == len(ROWS[name])
    prompt = dataset.prompt(0, 0)
    assert prompt.source == PUBLISHED[name].data_source
    assert prompt.text.endswith(f"{PUBLISHED[name].instruction}\n<assistant>")
    assert (prompt.ground_truth is None) == (name == "hh_rlhf")
    assert reward_of(prompt.source) == PUBLISHED[name].reward


@pytest.mark.parametrize("name", ROWS)
def test_an_inspection_finds_no_bad_row_and_scores_the_answers_with_the_reward_of_their_source(name, tmp_path):
    copy = open_copy(PUBLISHED[name], str(write_jsonl(tmp_path / f"{PUBLISHED[name].splits[0]}.jsonl", ROWS[name])))
    files = output_files(tmp_path / "out", copy, force=False)
    write(files, convert(PUBLISHED[name], copy, None, strict=True))
    settings = Settings(DataConfig(train=""), None, None, 0)
    (report,) = inspect_files([str(file) for file in files.values()], settings).files
    size, reward = len(ROWS[name]), PUBLISHED[name].reward
    assert (report.rows, report.bad, report.sources) == (size, [], {PUBLISHED[name].data_source: size})
    assert [(each.reward, each.scored) for each in report.judged] == ([] if reward is None else [(reward, size)])


def test_every_reward_of_a_published_dataset_is_built_in():
    assert {each.reward for each in PUBLISHED.values() if each.reward} <= set(REWARDS.names())


def test_repeated_prompts_are_left_out_the_first_kept_and_counted_by_what_differs(tmp_path):
    rows = [dapo(1), dapo(2), *(dapo(1, copy=number) for number in range(20)), dapo(2, answer=7)]
    done = convert_rows("dapo_math", rows, tmp_path)
    assert [(row["extra_info"]["index"], truth(row)) for row in done.rows] == [(0, "2"), (1, "3")]
    assert (done.read, done.dropped) == (23, [])
    repeats, conflict = (
        done.repeated["repeats an earlier row"],
        done.repeated["repeats the prompt of an earlier row, with another ground truth"],
    )
    assert (repeats.count, len(repeats.first), conflict.count) == (20, 10, 1)
    assert (repeats.first[0][-6:], conflict.first[0][-7:]) == ("line 3", "line 23")
    kept = convert_rows("dapo_math", rows, tmp_path, keep=True)
    assert (len(kept.rows), kept.repeated) == (23, {})
    assert kept.rows[0]["prompt"] == dapo(1)["prompt"]  # which says how to answer already


def test_training_rows_with_a_prompt_of_a_held_out_split_are_left_out(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", LOGIQA)
    write_jsonl(tmp_path / "validation.jsonl", LOGIQA[1:2])
    write_jsonl(tmp_path / "test.jsonl", [{**LOGIQA[2], "context": " Passage  2."}])
    copy = open_copy(PUBLISHED["logiqa"], str(tmp_path))
    done = convert(PUBLISHED["logiqa"], copy, None, strict=True)
    assert list(done) == ["train", "validation", "test"]
    assert [truth(row) for row in done["train"].rows] == ["A", "D"]
    assert {reason: places.count for reason, places in done["train"].repeated.items()} == {
        "has a prompt of validation": 1,
        "has a prompt of test": 1,
    }
    assert (len(done["validation"].rows), len(done["test"].rows)) == (1, 1)
    assert len(convert(PUBLISHED["logiqa"], copy, None, True, keep_duplicates=True)["train"].rows) == 4
    write_jsonl(tmp_path / "train.jsonl", LOGIQA[1:3])
    with pytest.raises(DataError, match=r"all 2 rows of train have a prompt of another split.*--keep-duplicates"):
        convert(PUBLISHED["logiqa"], open_copy(PUBLISHED["logiqa"], str(tmp_path)), None, strict=True)


@pytest.mark.parametrize("name", ["reclor", "logiqa"])
def test_options_are_lettered_and_the_ground_truth_is_the_letter_of_the_right_one(name, tmp_path):
    done = convert_rows(name, ROWS[name], tmp_path)
    assert [truth(row) for row in done.rows] == ["A", "B", "C", "D"]
    (message,) = done.rows[2]["prompt"]
    assert message["content"] == (
        "Passage 2.\n\nWhat follows?\n\nA. All birds fly.\nB. Some birds swim.\nC. No bird sings.\nD. Birds eat.\n\n"
        + PUBLISHED[name].instruction
    )


def test_the_right_option_may_be_text_and_must_be_one_of_the_options(tmp_path):
    assert truth(example("logiqa", {**LOGIQA[0], "correct_option": "3"}, tmp_path)) == "D"
    assert truth(example("logiqa", {**LOGIQA[0], "correct_option": "b"}, tmp_path)) == "B"
    original = {"context": "c", "question": "q", "options": OPTIONS, "label": 1}
    assert truth(example("reclor", original, tmp_path)) == "B"
    for wrong in (4, -1, "E", "", "1.0"):
        assert "none of the 4 options" in reason("reclor", {**RECLOR[0], "label": wrong}, tmp_path), wrong
    assert "1 options" in reason("reclor", {**RECLOR[0], "answers": ["x"]}, tmp_path)
    assert "is no list of texts" in reason("reclor", {**RECLOR[0], "answers": "x"}, tmp_path)


def test_the_shared_turns_are_the_prompt_and_the_last_ones_the_chosen_and_rejected_responses(tmp_path):
    first, _, third = convert_rows("hh_rlhf", HH_RLHF, tmp_path).rows
    assert first["prompt"] == [{"role": "user", "content": "Hello"}]
    assert first["chosen"] == [{"role": "assistant", "content": "Hi there."}]
    assert first["rejected"] == [{"role": "assistant", "content": "Go away."}]
    assert first["reward_model"] == {"style": "model", "ground_truth": None}
    assert [message["role"] for message in third["prompt"]] == ["user", "assistant", "user"]
    assert third["chosen"] == [{"role": "assistant", "content": "Because:\n\nit is."}]
    early = {
        "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        "rejected": "\n\nHuman: a\n\nAssistant: x",
    }
    row = example("hh_rlhf", early, tmp_path)
    assert ([m["content"] for m in row["prompt"]], [m["content"] for m in row["chosen"]]) == (["a"], ["b", "c", "d"])
    twice = {
        "chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c",
        "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d",
    }
    assert example("hh_rlhf", twice, tmp_path)["prompt"] == [{"role": "user", "content": "a\n\nb"}]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (pair("Hello", chosen="same", rejected="same"), "are equal"),
        (pair("Hello", chosen="good", rejected=""), "the response of 'rejected' is empty"),
        ({"chosen": "Hello", "rejected": "Hello"}, "does not begin with 'Human:'"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"}, "the same turn"),
    ],
)
def test_transcripts_without_two_responses_to_one_prompt_are_dropped(row, part, tmp_path):
    assert part in reason("hh_rlhf", row, tmp_path)


def test_equal_prompts_with_other_responses_are_other_pairs(tmp_path):
    done = convert_rows("hh_rlhf", [*HH_RLHF, HH_RLHF[0]], tmp_path)
    assert (len(done.rows), {reason: each.count for reason, each in done.repeated.items()}) == (
        3, {"repeats an earlier row": 1},
    )  # fmt: skip


def test_compressed_lines_are_read_and_red_teaming_is_left_aside(tmp_path):
    for folder in ("helpful-base", "harmless-base", "red-team-attempts"):
        (tmp_path / folder).mkdir()
        rows = HH_RLHF[:1] if folder == "helpful-base" else HH_RLHF[2:]
        with gzip.open(tmp_path / folder / "train.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    copy = open_copy(PUBLISHED["hh_rlhf"], str(tmp_path))
    assert copy.skipped == {"of another subset": ["red-team-attempts/train.jsonl.gz"]}
    assert len(convert(PUBLISHED["hh_rlhf"], copy, None, strict=True)["train"].rows) == 2
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(b'{"chosen": 1}\n' * 1000)[:-12])
    with pytest.raises(DataError, match=r"train\.jsonl\.gz: truncated, damaged or not a gzip file"):
        open_copy(PUBLISHED["hh_rlhf"], str(tmp_path / "train.jsonl.gz"))
    (tmp_path / "train.json.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"only \.jsonl\.gz can be read; unpack it"):
        open_copy(PUBLISHED["hh_rlhf"], str(tmp_path / "train.json.gz"))


def test_all_aliases_are_accepted_answers_and_hidden_ones_none(tmp_path):
    row = example("trivia_qa", TRIVIA_QA[0], tmp_path)
    assert truth(row) == ["David Seville", "Ross Bagdasarian"]
    hidden = {**TRIVIA_QA[0], "answer": {"value": "<unk>", "aliases": []}}
    assert "no accepted answer" in reason("trivia_qa", hidden, tmp_path)
    assert "no fields 'value'" in reason("trivia_qa", {**TRIVIA_QA[0], "answer": "x"}, tmp_path)
    files = output_files(tmp_path / "out", open_copy(PUBLISHED["trivia_qa"], str(tmp_path / "train.jsonl")), False)
    write_jsonl(tmp_path / "train.jsonl", TRIVIA_QA)
    copy = open_copy(PUBLISHED["trivia_qa"], str(tmp_path / "train.jsonl"))
    write(files, convert(PUBLISHED["trivia_qa"], copy, None, strict=True))
    assert truth(pyarrow.parquet.read_table(files["train"]).to_pylist()[0]) == ["David Seville", "Ross Bagdasarian"]


def test_programs_keep_their_tests_as_one_ground_truth(tmp_path):
    row = example("humaneval", ROWS["humaneval"][0], tmp_path)
    assert json.loads(truth(row)) == {"test": ROWS["humaneval"][0]["test"], "entry_point": "double"}
    assert row["prompt"][0]["content"].startswith('```python\ndef double(x):\n    """Return twice x."""\n```\n\n')
    row = example("mbpp", ROWS["mbpp"][0], tmp_path)
    assert json.loads(truth(row)) == {"test_list": ["assert double(2) == 4", "assert double(3) == 6"]}
    assert (
        "double a number.\n\nThese tests must pass:\n```python\nassert double(2) == 4\n" in row["prompt"][0]["content"]
    )
    assert (row["extra_info"]["task_id"], row["extra_info"]["solution"][:3]) == ("11", "def")
    row = example("mbpp", MBPP_SANITIZED[0], tmp_path)
    assert json.loads(truth(row))["test_imports"] == ["import math"]
    named = {"code": "def sum(a, b):\r\n  return a + b", "test_list": ["assert sum(10, 15) == 25"]}
    tests = json.loads(truth(example("mbpp", {**ROWS["mbpp"][0], **named}, tmp_path)))
    assert tests["entry_point"] == "sum"  # or the built-in function would be tested
    assert read_tests(tests, {}).count == 1
    assert "'test_list' is empty" in reason("mbpp", {**ROWS["mbpp"][0], "test_list": []}, tmp_path)


def test_a_prompt_that_needs_an_image_is_dropped(tmp_path):
    assert "'images' holds images" in reason("dapo_math", {**dapo(1), "images": ["x.png"]}, tmp_path)


def test_the_hubs_parquet_branch_is_read_where_a_dataset_is_a_script(monkeypatch):
    calls = []

    def load_dataset(*words, revision):
        calls.append((*words, revision))
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(LOGIQA), "dev": datasets.Dataset.from_list(LOGIQA)}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(open_copy(PUBLISHED["logiqa"], None).splits) == ["train", "validation"]
    open_copy(PUBLISHED["logiqa"], "somebody/logiqa")
    assert calls == [("lucasmccabe/logiqa", None, "refs/convert/parquet"), ("somebody/logiqa", None, None)]


def test_a_split_without_published_answers_is_skipped_in_a_folder_and_refused_alone(tmp_path):
    write_jsonl(tmp_path / "val.json", [json.dumps(RECLOR)])
    write_jsonl(tmp_path / "test.json", [json.dumps([{"context": "c", "question": "q", "answers": OPTIONS}])])
    copy = open_copy(PUBLISHED["reclor"], str(tmp_path))
    assert (list(copy.splits), copy.skipped) == (["validation"], {"of the split test": ["test.json"]})
    with pytest.raises(DataError, match="implies the split 'test', and ReClor has answers for train and validation"):
        open_copy(PUBLISHED["reclor"], str(tmp_path / "test.json"))


def test_published_columns_name_their_dataset():
    for name in ("reclor", "logiqa", "trivia_qa", "humaneval", "mbpp", "hh_rlhf", "dapo_math_processed"):
        assert published_with(tuple(ROWS[name][0])) == name
    assert published_with(tuple(ROWS["dapo_math"][0])) is None  # verl's schema: data.train reads it
    assert read_prompt(ROWS["dapo_math"][0], "prompt", "x")
