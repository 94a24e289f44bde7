"""Data files as the trainer reads them: every bad row is told, lengths are lengths, repeats are found."""

import json
import math

import pyarrow.parquet
import pytest

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.convert import convert, output_files, write
from hwgrpo.data.dataset_files import open_copy
from hwgrpo.data.inspection import Lengths, Overlap, Repeat, Settings, inspect_files
from hwgrpo.data.published import PUBLISHED
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.signatures import load_function, make_reward_function
from hwgrpo.sandbox.code_reward import close_pools
from tests.support.runs.published_rows import GSM8K, MATH, write_jsonl


def inspected(*files, rewards=None, tokenizer=None, score_rows=0, **data):
    """Inspect files under the default settings and what a test changes."""
    functions = rewards and [
        make_reward_function(*load_function(name, name), {}, {"max_response_tokens": 8}, name) for name in rewards
    ]
    return inspect_files(
        [str(file) for file in files], Settings(DataConfig(train="", **data), functions, tokenizer, score_rows)
    )


def reasons(report):
    return {bad.index: bad.reason for bad in report.bad}


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", GSM8K), ("math", MATH)])
def test_a_converted_dataset_is_all_good_and_scored_by_the_reward_of_its_source(name, rows, tmp_path):
    copy = open_copy(PUBLISHED[name], str(write_jsonl(tmp_path / "train.jsonl", rows)))
    files = output_files(tmp_path, copy, force=False)
    write(files, convert(PUBLISHED[name], copy, None, strict=True))
    (report,) = inspected(files["train"]).files
    assert (report.rows, report.bad, report.repeats, report.unanswered) == (10, [], [], 0)
    assert report.prompts == {"messages: user": 10}
    assert report.ground_truths == {"reward_model.ground_truth": 10}
    assert report.sources == {PUBLISHED[name].hub: 10}
    assert [(each.reward, each.tried, each.scored, each.failed) for each in report.judged] == [(name, 10, 10, 0)]
    shortest = min(len(row[PUBLISHED[name].columns[0]]) for row in rows)
    assert report.characters.min == shortest + 1 + len(PUBLISHED[name].instruction)


def test_every_bad_row_is_told_with_its_index_and_reason(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1"}, {"prompt": " ", "answer": "2"}, "{", {"prompt": 3, "answer": "4"},
        {"answer": "5"}, {"prompt": "e"}, {"prompt": "f", "answer": "  "}, "[7]",
        {"prompt": [{"role": "user", "content": ""}], "answer": "8"}, {"prompt": "i", "answer": "9"},
    ]  # fmt: skip
    (report,) = inspected(write_jsonl(tmp_path / "bad.jsonl", rows)).files
    expected = {
        1: "column 'prompt' is empty",
        2: "not valid JSON",
        3: "column 'prompt' is of type int",
        4: "no column 'prompt'",
        5: "no ground truth, which other rows have",
        6: "the ground truth (answer) is empty",
        7: "a row must be",
        8: "column 'prompt', message 0 is empty",
    }
    assert set(reasons(report)) == set(expected)
    for index, reason in expected.items():
        assert reasons(report)[index].startswith(reason)
        assert report.bad[index - 1].place == f"{report.name}, line {index + 1}"
    assert report.rows == 10
    assert report.prompts == {"text": 2}


def test_a_file_in_which_no_row_has_an_answer_is_not_bad(tmp_path):
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])).files
    assert (report.bad, report.unanswered, report.ground_truths, report.judged) == ([], 2, {}, [])
    assert report.sources == {"a.jsonl": 2}


def test_lengths_are_of_prompts_that_exist(tmp_path):
    rows = [{"prompt": "x" * length} for length in (5, 1, 2, 30, 3, 4)]
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", rows)).files
    assert report.characters == Lengths(min=1, median=4, p95=30, max=30)
    assert report.tokens is None
    twenty = [{"prompt": "x" * length} for length in range(1, 22)]
    (report,) = inspected(write_jsonl(tmp_path / "b.jsonl", twenty)).files
    assert report.characters == Lengths(min=1, median=11, p95=20, max=21)


def test_tokens_are_counted_as_the_model_gets_them(tmp_path, tokenizer, tokenizer_without_template):
    rows = [{"prompt": "abc"}, {"prompt": [{"role": "user", "content": "abcd"}, {"role": "user", "content": "e"}]}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    (report,) = inspected(file, tokenizer=tokenizer, max_prompt_tokens=20).files
    templated = "<user>abcd\n<user>e\n<assistant>"
    # plain text gets one more, the beginning of the sequence
    assert (report.tokens.min, report.tokens.max) == (len("abc") + 1, len(templated))
    assert report.overlong == 1
    assert (report.characters.min, report.characters.max) == (len("abc"), len("abcd\ne"))
    with pytest.raises(ConfigError, match=r"no chat template.*--recipe RECIPE"):
        inspected(file, tokenizer=tokenizer_without_template)
    joined = inspected(file, tokenizer=tokenizer_without_template, chat="never").files[0]
    assert (joined.tokens.max, joined.overlong) == (len("abcd\ne") + 1, 0)


def test_what_the_chat_template_refuses_is_a_bad_row(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": role, "content": "x"}]} for role in ("user", "tool")]
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer=tokenizer).files
    assert list(reasons(report)) == [1]
    assert "no tools here" in reasons(report)[1]
    assert report.tokens == Lengths(*[len("<user>x\n<assistant>")] * 4)


def test_repeated_prompts_and_those_in_two_files_are_found_whatever_their_white_space(tmp_path):
    one = write_jsonl(tmp_path / "train.jsonl", [{"prompt": text} for text in ("a b", "c", " a  b\n", "d", "c")])
    asked = [[{"role": "user", "content": "d"}], [{"role": "system", "content": "c"}], "A b", "c"]
    two = write_jsonl(tmp_path / "test.jsonl", [{"prompt": prompt} for prompt in asked])
    found = inspected(one, two)
    assert found.files[0].repeats == [
        Repeat(f"{one}, line 3", f"{one}, line 1"), Repeat(f"{one}, line 5", f"{one}, line 2"),
    ]  # fmt: skip
    assert found.files[1].repeats == []
    assert found.overlaps == [Overlap((str(one), str(two)), 2, (f"{one}, line 2", f"{two}, line 4"))]
    assert inspected(one, one).overlaps == []  # the same file twice is one file


def test_a_folder_stands_for_its_files_training_first(tmp_path):
    for name in ("test.jsonl", "train.jsonl", ".train.jsonl", "notes.txt"):
        write_jsonl(tmp_path / name, [{"prompt": name}])
    assert [file.name for file in inspected(tmp_path).files] == [
        str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl"),
    ]  # fmt: skip


def test_rows_that_a_reward_cannot_score_are_bad(tmp_path):
    answers = ["12", "none", "1,080", "\\frac{1}{2}"]
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": answer, "answer": answer} for answer in answers])
    (report,) = inspected(file, rewards=["gsm8k"]).files
    assert reasons(report) == {
        1: "reward gsm8k fails: the ground truth 'none' contains no number",
        3: "reward gsm8k gives the row's own ground truth no more than an empty response",
    }
    assert [(each.tried, each.scored, each.failed) for each in report.judged] == [(4, 2, 1)]
    assert [(each.reward, each.scored) for each in inspected(file, rewards=["exact_match"]).files[0].judged] == [
        ("exact_match", 4)
    ]
    rows = [{"prompt": each, "answer": each, "data_source": "openai/gsm8k"} for each in ("18", "1,080")]
    (report,) = inspected(write_jsonl(tmp_path / "b.jsonl", rows), rewards=["by_source"]).files
    assert reasons(report) == {  # verl's rule removes the commas of a response, and not those of the ground truth
        1: "reward by_source gives the row's own ground truth no more than an empty response"
    }
    assert inspected(file).files[0].judged == []  # nothing says which reward such a source has


def test_a_gap_in_a_column_of_numbers_is_a_row_without_an_answer_and_the_others_are_whole_numbers(tmp_path):
    file = tmp_path / "a.parquet"
    answers = pyarrow.array([18.0, math.nan, None, 1e16])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": list("abcd"), "answer": answers}), file)
    (report,) = inspected(file, rewards=["exact_match", "gsm8k", "numeric", "question_exact_match"]).files
    assert reasons(report) == dict.fromkeys((1, 2), "no ground truth, which other rows have")
    assert [(each.tried, each.scored) for each in report.judged] == [(2, 2)] * 4


def test_a_mapping_as_ground_truth_is_bad_but_for_the_rewards_that_read_its_field(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": {"target": ["Paris"]}}])
    (report,) = inspected(file, rewards=["exact_match"]).files
    assert "is a mapping, which is not read here" in reasons(report)[0]
    assert inspected(file, rewards=["question_exact_match"]).files[0].bad == []


def test_a_comparing_reward_that_gives_nothing_for_the_answer_itself_makes_a_bad_row(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "12"}, {"prompt": "b", "answer": "5"}])
    blind = tmp_path / "rewards.py"
    blind.write_text(
        "def gsm8k(solution_str, ground_truth): return 1.0 if '5' in solution_str else 0.0\n"
        "def taste(solution_str): return {'score': 0.5}\n"
        "def text(solution_str): return 'good'\n"
        "def lost(solution_str): return float('nan')\n"
        "def leaves(solution_str): raise SystemExit(3)\n"
    )
    (report,) = inspected(file, rewards=[f"{blind}:gsm8k"]).files
    assert reasons(report) == {0: "reward gsm8k gives the row's own ground truth no more than an empty response"}
    (report,) = inspected(file, rewards=[f"{blind}:taste", "length"]).files
    assert report.bad == []  # a reward of the user's own need not look at the answer
    assert [(each.reward, each.tried, each.scored) for each in report.judged] == [("taste", 2, 0), ("length", 0, 0)]
    assert "--dry-run" in report.judged[1].why_not
    for name, reason in (
        ("text", "it returned 'good', not a finite number"),
        ("lost", "it returned nan, not a finite number"),
        ("leaves", "it raised SystemExit: 3 at "),
    ):
        (report,) = inspected(file, rewards=[f"{blind}:{name}"]).files
        assert list(reasons(report)) == [0, 1]
        assert all(said.startswith(f"reward {name} fails: {reason}") for said in reasons(report).values())


def test_rewards_are_tried_on_rows_spread_over_the_file(tmp_path):
    rows = [{"prompt": str(n), "answer": "12" if n % 10 else "none"} for n in range(100)]
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", rows), rewards=["gsm8k"], score_rows=5).files
    assert list(reasons(report)) == [0, 20, 40, 60, 80]
    assert report.judged[0].tried == 5


def test_mixed_sources_get_each_its_own_reward(tmp_path):
    sources = ["openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval", "mine", "openai/gsm8k"]
    answers = ["12", "x^2", "anything", "13"]
    rows = [
        {"prompt": str(n), "answer": answer, "data_source": source}
        for n, (answer, source) in enumerate(zip(answers, sources, strict=True))
    ]
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", rows)).files
    assert [(each.reward, each.tried, each.scored) for each in report.judged] == [("gsm8k", 2, 2), ("math", 1, 1)]
    assert next(iter(report.sources.items())) == ("openai/gsm8k", 2)


def test_columns_are_named_by_the_data_settings(tmp_path):
    rows = [{"question": "a", "key": {"value": 5}, "origin": "here"}, {"question": "b", "key": {}, "origin": "there"}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    keys = {"prompt_key": "question", "ground_truth_key": "key.value", "source_key": "origin"}
    (report,) = inspected(file, **keys).files
    assert report.ground_truths == {"key.value": 1}
    assert report.sources == {"here": 1}
    assert "no column 'key.value'" in reasons(report)[1]


def test_a_file_without_prompts_is_an_error_that_names_the_command_to_convert_it(tmp_path):
    with pytest.raises(DataError, match="hwgrpo data gsm8k --source"):
        inspected(write_jsonl(tmp_path / "train.jsonl", GSM8K))
    with pytest.raises(DataError, match=r"no column 'prompt'.*Did you mean 'prompts'.*--recipe RECIPE"):
        inspected(write_jsonl(tmp_path / "other.jsonl", [{"prompts": "a"}]))
    with pytest.raises(DataError, match="no such file or folder"):
        inspected(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data files"):
        inspected(tmp_path / "empty")


def test_a_file_of_nothing_but_broken_lines_is_told_line_by_line(tmp_path):
    (report,) = inspected(write_jsonl(tmp_path / "a.jsonl", ["{", json.dumps(3)])).files
    assert list(reasons(report)) == [0, 1]
    assert report.characters is None


def test_tests_that_prove_nothing_are_bad_rows_wherever_the_tests_are(tmp_path):
    rows = [
        {"prompt": "a", "test": "def test_a():\n    assert add(1, 2) == 3"},
        {"prompt": "b", "test": "def test_b():\n    add(1, 2) == 3"},
        {"prompt": "c", "test": "from unittest import mock\nadd = mock.Mock()\nassert add(1, 2) == 3"},
    ]
    (report,) = inspected(write_jsonl(tmp_path / "rows.jsonl", rows), rewards=["code"]).files
    close_pools()
    assert sorted(reasons(report)) == [1, 2]
    assert "write assert before it" in reasons(report)[1]
    assert "unittest.mock" in reasons(report)[2]
    assert [(each.reward, each.tried, each.scored, each.failed) for each in report.judged] == [("code", 3, 1, 2)]
