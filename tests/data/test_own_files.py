"""Files of the user's own: their columns, the split of validation prompts, and mistakes."""

import pytest

from hwgrpo.data.convert import convert, output_files, write
from hwgrpo.data.own_files import open_files, own_conversion, split_off, validation_size
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import ConfigError, DataError
from tests.support.runs.published_rows import write_jsonl


def converted(*files, prompt_key="prompt", answer_key=None, instruction=None, strict=True, keep=False):
    own = own_conversion("mine", prompt_key, answer_key, None, "mine")
    return convert(own, open_files([str(file) for file in files]), instruction, strict, keep)


def truths(split):
    return [row["reward_model"]["ground_truth"] for row in split.rows]


def prompts(split):
    return [row["prompt"][-1]["content"] for row in split.rows]


def numbered(tmp_path, count=40, name="mine.jsonl"):
    return write_jsonl(tmp_path / name, [{"prompt": f"sort {n}", "answer": n} for n in range(count)])


def test_columns_are_named_and_rows_become_what_the_trainer_reads(tmp_path, data_config, tokenizer):
    file = tmp_path / "mine.csv"
    file.write_text('q,a\n"1+1, now",2\n1+2,3\n')
    done = converted(file, prompt_key="q", answer_key="a", instruction="Briefly.")
    assert (prompts(done["train"]), truths(done["train"])) == (["1+1, now Briefly.", "1+2 Briefly."], ["2", "3"])
    assert done["train"].rows[0]["extra_info"] == {"split": "train", "index": 0}
    files = output_files(tmp_path / "out", open_files([str(file)]), force=False)
    write(files, done)
    dataset = build_dataset(data_config(files["train"]), tokenizer, "train")
    assert dataset is not None
    assert (dataset.prompt(0, 0).ground_truth, dataset.prompt(0, 0).source) == ("2", "mine")


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (2, "2"),
        (0.5, "0.5"),
        (18.0, "18"),
        (True, "true"),
        ("x", "x"),
        (["a", 1.0], ["a", "1"]),
        ({"inputs": ["1"]}, '{"inputs": ["1"]}'),
        ([{"a": 1}], '[{"a": 1}]'),
    ],
)
def test_ground_truths_are_text_or_a_list_of_accepted_answers_or_json(answer, truth, tmp_path):
    assert truths(converted(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": answer}]))["train"]) == [truth]


def test_answers_come_from_the_usual_columns_from_a_nested_one_or_from_none(tmp_path):
    rows = [{"prompt": "p", "solution": "s", "meta": {"gold": "g"}}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert truths(converted(file)["train"]) == ["s"]
    assert truths(converted(file, answer_key="meta.gold")["train"]) == ["g"]
    assert truths(converted(file, answer_key="")["train"]) == [None]
    with pytest.raises(DataError, match=r"no column 'gold'.*there are: prompt, solution, meta"):
        converted(file, answer_key="gold")


def test_rows_that_cannot_be_used_are_named(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "p"}]}],
         "answer": "1"},
        {"prompt": "b", "answer": ["2"]}, {"prompt": "c"}, {"prompt": "", "answer": "4"}, {"prompt": 5, "answer": "5"},
        {"prompt": [{"role": "user", "content": "f", "name": "n"}], "answer": "6"},
        {"prompt": "g", "answer": "7", "image": "x.png"}, {"prompt": "h", "answer": " "},
        {"prompt": "\ud800", "answer": "9"},
    ]  # fmt: skip
    done = converted(write_jsonl(tmp_path / "a.jsonl", rows), strict=False)["train"]
    assert [(message["role"], message["content"]) for message in done.rows[0]["prompt"]] == [
        ("system", "s"),
        ("user", "p"),
    ]
    assert len(done.rows) == 1
    parts = ["is a list, unlike others", "--answer-key", "is empty", "is of type int", "has 'name'", "holds images",
             "is empty", "surrogate pair"]  # fmt: skip
    assert [part in each.reason for part, each in zip(parts, done.dropped, strict=True)] == [True] * 8, done.dropped


def test_names_of_files_tell_splits(tmp_path):
    train, test = numbered(tmp_path, 5, "train.jsonl"), numbered(tmp_path, 2, "test.jsonl")
    done = converted(test, train)
    assert (list(done), truths(done["train"]), truths(done["test"])) == (["train", "test"], ["2", "3", "4"], ["0", "1"])
    for name, part in (("nothing.jsonl", "no such file"), (str(tmp_path), "is a folder; name its files")):
        with pytest.raises(DataError, match=part):
            open_files([name])


def test_the_same_prompts_are_held_out_whatever_the_order_of_the_rows(tmp_path):
    rows = [{"prompt": f"sort {n}", "answer": n} for n in range(40)]
    one = split_off(converted(write_jsonl(tmp_path / "a.jsonl", rows)), 10)
    other = split_off(converted(write_jsonl(tmp_path / "b.jsonl", rows[::-1])), 0.25)
    assert [len(each.rows) for each in one.values()] == [30, 10]
    assert sorted(prompts(one["validation"])) == sorted(prompts(other["validation"]))
    assert not set(prompts(one["train"])) & set(prompts(one["validation"]))
    assert prompts(one["validation"]) != [f"sort {n}" for n in range(10)]
    assert {row["extra_info"]["split"] for row in one["validation"].rows} == {"validation"}
    assert one["train"].read == 40


def test_equal_prompts_are_on_one_side_where_duplicates_are_kept(tmp_path):
    rows = [{"prompt": f"sort {n % 5}", "answer": n} for n in range(20)]
    done = split_off(converted(write_jsonl(tmp_path / "a.jsonl", rows), keep=True), 2)
    assert [len(each.rows) for each in done.values()] == [12, 8]
    assert not set(prompts(done["train"])) & set(prompts(done["validation"]))


@pytest.mark.parametrize("text", ["0", "-3", "1.0", "1.5", "0.0", "some", "nan", "0.x"])
def test_a_size_is_a_number_of_prompts_or_a_share(text):
    assert (validation_size("3"), validation_size("0.05")) == (3, 0.05)
    with pytest.raises(ConfigError, match=f"--validation {text}: use a number of prompts"):
        validation_size(text)


def test_a_split_needs_rows_on_both_sides_and_no_validation_file(tmp_path):
    done = converted(numbered(tmp_path, 4))
    with pytest.raises(ConfigError, match="train has 4 prompts; leave some"):
        split_off(done, 4)
    assert len(split_off(done, 0.01)["validation"].rows) == 1
    with pytest.raises(ConfigError, match=r"the files are of train and validation"):
        split_off(converted(numbered(tmp_path, 4), numbered(tmp_path, 2, "val.jsonl")), 1)
