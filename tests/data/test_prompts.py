import datetime
import decimal
import math
from types import SimpleNamespace
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hwgrpo.config.schema import FewShotConfig
from hwgrpo.data.prompts import _content, build_dataset, dataset_notes, template_note
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.training.resume import compare_data

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]


def decode(tokenizer, prompt):
    return tokenizer.decode(list(prompt.token_ids))


def test_verls_columns_become_a_templated_prompt_with_truth_source_and_every_column(tmp_path, data_config, tokenizer):
    path = tmp_path / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL_ROWS), path)
    dataset = build_dataset(data_config(path), tokenizer, "train")
    assert len(dataset) == 3
    prompt = dataset.prompt(1, epoch=2)
    assert prompt.uid == "2:1"
    assert prompt.text == "<user>What is 1 + 1?\n<assistant>"
    assert decode(tokenizer, prompt) == prompt.text
    assert prompt.ground_truth == "2"
    assert prompt.source == "openai/gsm8k"
    assert prompt.columns == VERL_ROWS[1]
    assert prompt.messages == ({"role": "user", "content": "What is 1 + 1?"},)


def test_trls_columns_become_a_plain_prompt_with_the_tokenizers_special_tokens(jsonl, data_config, tokenizer):
    rows = [{"prompt": "2+2=", "solution": "4", "level": 3}]
    prompt = build_dataset(data_config(jsonl(rows)), tokenizer, "train").prompt(0, 0)
    assert prompt.text == "2+2="
    assert decode(tokenizer, prompt) == "^2+2="
    assert (prompt.ground_truth, prompt.source, prompt.messages) == ("4", "data.jsonl", None)
    assert prompt.columns == rows[0]


def test_plain_and_chat_rows_of_one_file_keep_their_order(jsonl, data_config, tokenizer):
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    dataset = build_dataset(data_config(jsonl(rows)), tokenizer, "train")
    assert [decode(tokenizer, dataset.prompt(row, 0)) for row in range(3)] == ["^a", "<user>b\n<assistant>", "^c"]


@pytest.mark.parametrize(
    ("settings", "row", "text"),
    [
        ({"chat": "always"}, "hi", "<user>hi\n<assistant>"),
        ({"chat": "always", "system_prompt": "be"}, "hi", "<system>be\n<user>hi\n<assistant>"),
        ({"system_prompt": "be"}, [{"role": "user", "content": "hi"}], "<system>be\n<user>hi\n<assistant>"),
        (
            {"system_prompt": "be"},
            [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}],
            "<system>own\n<user>hi\n<assistant>",
        ),
        ({"instruction": "be"}, "hi", "hi be"),
        ({"instruction": "\nbe"}, [{"role": "user", "content": "hi"}], "<user>hi\nbe\n<assistant>"),
        (
            {"instruction": "be"},
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "so"}],
            "<user>hi be\n<assistant>so",
        ),
        (
            {"few_shot": [FewShotConfig("a", "b")], "chat": "always", "instruction": "be"},
            "hi",
            "<user>a be\n<assistant>b\n<user>hi be\n<assistant>",
        ),
        (
            {"few_shot": [FewShotConfig("a", "b")], "system_prompt": "be"},
            [{"role": "user", "content": "hi"}],
            "<system>be\n<user>a\n<assistant>b\n<user>hi\n<assistant>",
        ),
        (
            {"few_shot": [FewShotConfig("a", "b")]},
            [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}],
            "<system>own\n<user>a\n<assistant>b\n<user>hi\n<assistant>",
        ),
        ({"chat": "never"}, [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}], "own\nhi"),
        ({"chat_template_kwargs": {"mood": "sad"}}, [{"role": "user", "content": "hi"}], "sad;<user>hi\n<assistant>"),
        (
            {"chat_template_kwargs": OmegaConf.create({"mood": "sad"})},
            [{"role": "user", "content": "hi"}],
            "sad;<user>hi\n<assistant>",
        ),
        (
            {},
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
            "<user>hi\n<assistant>so",
        ),
    ],
)
def test_chat_settings_decide_what_the_model_sees(settings, row, text, jsonl, data_config, tokenizer):
    dataset = build_dataset(data_config(jsonl([{"prompt": row}]), **settings), tokenizer, "train")
    assert dataset.prompt(0, 0).text == text


def test_message_fields_that_are_null_in_a_table_are_absent_for_the_template(tmp_path, data_config, tokenizer):
    path = tmp_path / "names.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "Al"}]},
        {"prompt": [{"role": "user", "content": "b", "name": None}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    dataset = build_dataset(data_config(path), tokenizer, "train")
    assert dataset.prompt(0, 0).text == "<user>(Al)a\n<assistant>"
    assert dataset.prompt(1, 0).text == "<user>b\n<assistant>"


@pytest.mark.parametrize(
    ("row", "key", "expected"),
    [
        ({"reward_model": {"ground_truth": 1}, "answer": 2}, None, 1),
        ({"target": 5, "solution": 4, "answer": 3, "ground_truth": 2}, None, 2),
        ({"target": 5, "solution": 4, "answer": 3}, None, 3),
        ({"target": 5, "solution": 4}, None, 4),
        ({"target": 5}, None, 5),
        ({"target": 5, "answer": None}, None, 5),
        ({"reward_model": "no object", "answer": 3}, None, 3),
        ({"other": 1}, None, None),
        ({"a": {"b": {"c": 7}}}, "a.b.c", 7),
        ({"a.b": 8, "a": {"b": 9}}, "a.b", 8),
        ({"label": 0, "answer": 1}, "label", 0),
    ],
)
def test_the_ground_truth_is_looked_up_as_documented(row, key, expected, jsonl, data_config, tokenizer):
    config = data_config(jsonl([{"prompt": "x", **row}]), ground_truth_key=key)
    assert build_dataset(config, tokenizer, "train").prompt(0, 0).ground_truth == expected


LENGTHS = [{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "ab"}]  # 4, 9 and 3 tokens with ^


@pytest.mark.parametrize(
    ("policy", "texts", "tokens", "filtered", "truncated"),
    [
        ("filter", ["abc", "ab"], ["^abc", "^ab"], 1, 0),
        ("truncate_left", ["abc", "efgh", "ab"], ["^abc", "efgh", "^ab"], 0, 1),
        ("truncate_right", ["abc", "^abc", "ab"], ["^abc", "^abc", "^ab"], 0, 1),
    ],
)
def test_overlong_prompts_are_filtered_or_cut_and_counted(
    policy, texts, tokens, filtered, truncated, jsonl, data_config, tokenizer
):
    dataset = build_dataset(data_config(jsonl(LENGTHS), max_prompt_tokens=4, overlong=policy), tokenizer, "train")
    prompts = [dataset.prompt(row, 0) for row in range(len(dataset))]
    assert [prompt.text for prompt in prompts] == texts
    assert [decode(tokenizer, prompt) for prompt in prompts] == tokens
    assert (dataset.filtered, dataset.truncated, dataset.longest) == (filtered, truncated, 4)
    assert prompts[-1].columns == {"prompt": "ab"}


def test_an_overlong_prompt_can_be_an_error_that_names_row_and_lengths(jsonl, data_config, tokenizer):
    config = data_config(jsonl(LENGTHS), max_prompt_tokens=4, overlong="error")
    with pytest.raises(DataError, match=r"data.jsonl, line 2: the prompt has 9 tokens, data.max_prompt_tokens=4"):
        build_dataset(config, tokenizer, "train")


def test_a_dataset_of_which_nothing_is_left_is_an_error_with_the_count(jsonl, data_config, tokenizer):
    with pytest.raises(DataError, match=r"all 3 prompts are longer than data.max_prompt_tokens=2"):
        build_dataset(data_config(jsonl(LENGTHS), max_prompt_tokens=2), tokenizer, "train")


def test_only_the_first_rows_are_used_where_a_limit_says_so(jsonl, data_config, tokenizer):
    path = jsonl([{"prompt": f"p{i}"} for i in range(5)])
    config = data_config(path, validation=str(path), max_rows=3, validation_max_rows=2)
    assert [build_dataset(config, tokenizer, which).texts for which in ("train", "validation")] == [
        ["p0", "p1", "p2"],
        ["p0", "p1"],
    ]


def test_prompts_beyond_one_tokenizer_batch_keep_their_rows(jsonl, data_config, tokenizer, monkeypatch):
    monkeypatch.setattr("hwgrpo.data.prompts.TOKENIZE_BATCH", 2)
    dataset = build_dataset(data_config(jsonl([{"prompt": f"p{i}"} for i in range(5)])), tokenizer, "train")
    assert [decode(tokenizer, dataset.prompt(row, 0)) for row in range(5)] == [f"^p{i}" for i in range(5)]
    assert [dataset.prompt(row, 0).columns["prompt"] for row in range(5)] == [f"p{i}" for i in range(5)]


def test_a_task_brings_its_own_validation_split(data_config, tokenizer):
    config = data_config("task://sort", max_rows=100, validation_max_rows=50)
    train, validation = (build_dataset(config, tokenizer, which) for which in ("train", "validation"))
    assert (len(train), len(validation)) == (100, 50)
    assert not set(train.texts) & set(validation.texts)


def test_without_a_validation_setting_a_file_has_no_validation(jsonl, data_config, tokenizer):
    assert build_dataset(data_config(jsonl(LENGTHS)), tokenizer, "validation") is None


def test_validation_reads_its_own_setting_and_split(jsonl, data_config, tokenizer):
    jsonl([{"prompt": "no"}], "folder/train.jsonl")
    folder = jsonl([{"prompt": "yes"}], "folder/test.jsonl").parent
    config = data_config("task://sort", validation=str(folder))
    assert build_dataset(config, tokenizer, "validation").texts == ["yes"]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (
            [{"promt": "x", "answer": "1"}],
            {},
            ["no column 'prompt'", "data.prompt_key", "promt, answer", "Did you mean 'promt'?"],
        ),
        ([{"prompt": "x"}, {"answer": "1"}], {}, ["data.jsonl, line 2", "no column 'prompt'", "answer"]),
        ([{"prompt": "x"}, {"prompt": " \n"}], {}, ["data.jsonl, line 2", "empty"]),
        ([{"prompt": "x"}, {"prompt": None}], {}, ["data.jsonl, line 2", "empty (null)"]),
        ([{"prompt": "x"}, {"prompt": []}], {}, ["data.jsonl, line 2", "empty conversation"]),
        ([{"prompt": [{"role": "user", "content": " "}]}], {}, ["line 1", "message 0 is empty"]),
        ([{"prompt": [{"role": "system", "content": ""}]}], {}, ["line 1", "only empty messages"]),
        ([{"prompt": 7}], {}, ["line 1", "of type int", "text or a list of chat messages"]),
        ([{"prompt": ["hi"]}], {}, ["line 1", "message 0 is not a chat message", '"role"']),
        ([{"prompt": [{"role": "user"}]}], {}, ["line 1", "message 0", "'content' is NoneType"]),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            {},
            ["line 1", "'image'", 'only {"type": "text"'],
        ),
        ([{"prompt": "a \ud800 b"}], {}, ["line 1", "half of a surrogate pair", "at character 2", r"'a \ud800 b'"]),
        ([{"prompt": [{"role": "user", "content": "\udfff"}]}], {}, ["line 1", "message 0", "surrogate"]),
        ([{"prompt": [{"role": "user", "content": "a", "name": "\ud800"}]}], {}, ["line 1", "rendered", "surrogate"]),
        ([{"prompt": [{"role": "tool", "content": "x"}]}], {}, ["line 1", "template refuses", "no tools here"]),
        (
            [{"prompt": "x", "answer": 1}],
            {"ground_truth_key": "anwser"},
            ["line 1", "'anwser'", "Did you mean 'answer'?"],
        ),
        ([{"prompt": "x", "y": 1}, {"prompt": "x"}], {"ground_truth_key": "y"}, ["line 2", "no column 'y'"]),
    ],
)
def test_a_malformed_row_is_refused_with_file_line_and_remedy(rows, settings, words, jsonl, data_config, tokenizer):
    with pytest.raises(DataError) as caught:
        build_dataset(data_config(jsonl(rows), **settings), tokenizer, "train")
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_empty_prompt_in_a_parquet_is_told_with_its_row(tmp_path, data_config, tokenizer):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", ""]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: column 'prompt' is empty"):
        build_dataset(data_config(path), tokenizer, "train")


@pytest.mark.parametrize(("chat", "noted"), [("auto", True), ("always", False), ("never", False)])
def test_plain_text_beside_a_chat_template_that_is_not_applied_is_noted(
    chat, noted, jsonl, data_config, tokenizer, tokenizer_without_template
):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": [{"role": "user", "content": "c"}]}]
    said = template_note("training", build_dataset(data_config(jsonl(rows), chat=chat), tokenizer, "train"))
    assert (said is not None) == noted
    if said is not None:
        assert said.startswith(
            "2 training prompts are plain text, to which the tokenizer's chat template is not applied"
        )
        assert "data.chat=always" in said
    plain = build_dataset(data_config(jsonl(rows[:2])), tokenizer_without_template, "train")
    assert template_note("training", plain) is None
    assert template_note("training", build_dataset(data_config("task://sort"), tokenizer, "train")) is None


def test_several_files_are_one_dataset_and_a_change_of_any_is_seen(tmp_path, jsonl, data_config, tokenizer):
    first, second = jsonl([{"prompt": "a", "answer": "1"}], "first.jsonl"), tmp_path / "second.csv"
    second.write_text("prompt,answer\nb,2\nc,3\n")
    both = [str(first), str(second)]

    def build(named, **changes):
        config = data_config("", **changes)
        config.train = named
        return build_dataset(config, tokenizer, "train")

    before = build(both)
    assert before.texts == ["a", "b", "c"]
    assert before.name == f"{first}, {second}"
    assert before.prompt(2, 0).place == f"{second}, line 3"
    assert [before.prompt(row, 0).source for row in range(3)] == ["first.jsonl", "second.csv", "second.csv"]
    checkpoint: Any = SimpleNamespace(manifest={"state": {"data": {"train": before.fingerprint}}})
    assert compare_data(checkpoint, train=build(both)) == []
    assert "has changed since" in compare_data(checkpoint, train=build(both[::-1]))[0]
    second.write_text("prompt,answer\nb,2\nc,4\n")
    (said,) = compare_data(checkpoint, train=build(both))
    assert f"data.train='{first}, {second}' has changed since the checkpoint: 3 rows" in said
    jsonl([{"question": "a"}], "first.jsonl")
    with pytest.raises(DataError, match=r"second.csv, line 2: no column 'question'.*there are: prompt, answer"):
        build(both, prompt_key="question")


def test_text_that_is_to_be_templated_needs_a_chat_template_too(jsonl, data_config, tokenizer_without_template):
    path = jsonl([{"prompt": "1+1="}])
    words = r"data\.chat=always puts plain text \(.*line 1\).*model\.chat_template.*data\.chat=auto"
    with pytest.raises(ConfigError, match=words):
        build_dataset(data_config(path, chat="always"), tokenizer_without_template, "train")


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (
            [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "result": "3"}, {"prompt": "0"}],
            {},
            r"line 2: no ground truth, which reward exact_match needs; tried reward_model\.ground_truth, ground_truth, "
            r"answer, .*; besides the prompt the row has: result\. Name .* with data\.ground_truth_key",
        ),
        ([{"prompt": "1+1=", "answer": None}], {"ground_truth_key": "answer"}, r"line 1: .*'answer' .* is null"),
        ([{"prompt": "1+1="}], {}, r"line 1: .*besides the prompt the row has: nothing else"),
        ([{"prompt": "1+1=", "answer": 2.0}, {"prompt": "1", "answer": math.nan}], {}, "line 2: no ground truth"),
        ([{"prompt": "1+1=", "answer": []}], {"ground_truth_key": "answer"}, "line 1: .* or an empty list"),
    ],
)
def test_a_row_without_the_answer_that_a_reward_needs_is_named_with_what_was_tried(
    rows, settings, words, jsonl, data_config, tokenizer
):
    dataset = build_dataset(data_config(jsonl(rows), **settings), tokenizer, "train")
    assert dataset is not None
    with pytest.raises(DataError, match=words):
        dataset.require_ground_truth("reward exact_match")


def test_rows_that_are_filtered_need_no_answer(jsonl, data_config, tokenizer):
    path = jsonl([{"prompt": "1+1=", "answer": 0}, {"prompt": "1+" * 60, "result": "?"}])
    dataset = build_dataset(data_config(path), tokenizer, "train")
    assert dataset is not None
    assert dataset.filtered == 1
    dataset.require_ground_truth("reward exact_match")


def test_a_conversation_needs_a_chat_template(jsonl, data_config, tokenizer_without_template):
    path = jsonl([{"prompt": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ConfigError, match=r"line 1.*no chat template; set model.chat_template.*data.chat=never"):
        build_dataset(data_config(path), tokenizer_without_template, "train")
    assert build_dataset(data_config(path, chat="never"), tokenizer_without_template, "train").texts == ["hi"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"system_prompt": "be"}, "data.system_prompt is set, but .*line 1 is plain text.*data.chat=always"),
        (
            {"few_shot": [FewShotConfig("1+1", "2")]},
            "data.few_shot is set, but .*line 1 is plain text.*data.chat=always, or remove data.few_shot",
        ),
        ({"overlong": "fliter"}, "data.overlong='fliter'.*Did you mean 'filter'"),
        ({"chat": "always", "chat_template_kwargs": {"tokenize": True}}, "data.chat_template_kwargs: tokenize"),
    ],
)
def test_settings_that_contradict_the_data_are_refused(settings, words, jsonl, data_config, tokenizer):
    with pytest.raises(ConfigError, match=words):
        build_dataset(data_config(jsonl([{"prompt": "x"}]), **settings), tokenizer, "train")


def test_an_instruction_needs_a_message_of_the_user(jsonl, data_config, tokenizer):
    path = jsonl([{"prompt": [{"role": "system", "content": "be"}]}])
    with pytest.raises(DataError, match=r"line 1.*no message of the user.*data.instruction"):
        build_dataset(data_config(path, instruction="Shortly."), tokenizer, "train")


def test_the_fingerprint_counts_the_rows_read_and_changes_with_any_column(jsonl, data_config, tokenizer):
    rows = [{"prompt": "a", "answer": "1", "extra_info": {"level": 3}}, {"prompt": "b" * 30, "answer": "2"}]

    def of(rows, **settings):
        return build_dataset(data_config(jsonl(rows), **settings), tokenizer, "train").fingerprint

    before = of(rows)
    assert before == of(rows, max_prompt_tokens=10) == of([*rows, rows[0]], max_rows=2)
    assert before["rows"] == 2
    for changed in (
        [rows[1], rows[0]],
        [{**rows[0], "extra_info": {"level": 4}}, rows[1]],
        [{**rows[0], "answer": "3"}, rows[1]],
        [rows[0], {**rows[1], "prompt": "c" * 30}],
    ):
        other = of(changed)
        assert other["rows"] == 2
        assert other["sha256"] != before["sha256"]
    assert of([*rows, rows[0]])["rows"] == 3


def test_values_that_json_does_not_know_have_the_same_fingerprint_in_every_process(tmp_path, data_config, tokenizer):
    day = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)

    def of(rows):
        path = tmp_path / "odd.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return build_dataset(data_config(path), tokenizer, "train").fingerprint["sha256"]

    row = {"prompt": "a", "raw": b"\xff", "day": day, "price": decimal.Decimal("1.5")}
    prints = [of([row]), *(of([{**row, **c}]) for c in ({"raw": b"\xfe"}, {"day": day.replace(day=3)}))]
    assert len({*prints, of([{**row, "price": decimal.Decimal("1.6")}])}) == 4
    assert of([row]) == prints[0]
    assert [_content(object()), _content(numpy.arange(2))] == ["object", [0, 1]]


def test_rows_that_a_limit_leaves_out_are_counted_and_said(jsonl, data_config, tokenizer):
    path = jsonl([{"prompt": str(number)} for number in range(5)])
    config = data_config(path, validation=str(path), validation_max_rows=3)
    some, all_rows = (build_dataset(config, tokenizer, which) for which in ("validation", "train"))
    assert some.row_counts == {"val-aux/rows": 3, "val-aux/rows_available": 5}
    assert next(dataset_notes("validation", some)) == (
        "validation: 3 of 5 rows are read (data.validation_max_rows=3; 0 reads all)"
    )
    assert all_rows.row_counts == {}
    assert not any("rows are read" in note for note in dataset_notes("training", all_rows))


def test_rows_without_a_ground_truth_are_counted_and_said(jsonl, data_config, tokenizer):
    some = build_dataset(data_config(jsonl([{"prompt": "a"}, {"prompt": "b", "answer": "1"}])), tokenizer, "train")
    assert [note for note in dataset_notes("training", some) if "ground truth" in note] == [
        "1 of 2 training prompts have no ground truth (columns reward_model.ground_truth, ground_truth, answer, "
        "solution, target): rewards that compare with it cannot score them"
    ]
    full = build_dataset(data_config(jsonl([{"prompt": "b", "answer": "1"}])), tokenizer, "train")
    assert not any("ground truth" in note for note in dataset_notes("training", full))


ASSISTANT = {"role": "assistant", "content": "so"}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "settings", "kind"),
    [
        ([USER, ASSISTANT], {}, "continued"),
        ([USER, ASSISTANT], {"chat": "never"}, "continued"),
        ('[{"role": "user", "content": "hi"}]', {}, "written_out"),
        ("[{'content': 'hi', 'role': 'user'}]", {}, "written_out"),
        ('{"role": "user", "content": "hi"}', {}, "written_out"),
        ("hi$", {}, "ended"),
        ([{"role": "user", "content": "a"}], {"chat_template_kwargs": {"mood": "sad"}}, None),
        ("^hi", {}, "two_beginnings"),
        ([{"role": "user", "content": "^hi"}], {"chat": "never"}, "two_beginnings"),
        ("hi", {}, None),
        ([ASSISTANT, USER], {}, None),
        ("a list [{'role'}] of", {}, None),
    ],
)
def test_what_is_odd_about_a_prompt_is_counted_and_said(prompt, settings, kind, jsonl, data_config, tokenizer):
    data = build_dataset(data_config(jsonl([{"prompt": prompt, "answer": "1"}] * 2), **settings), tokenizer, "train")
    assert dict(data.findings) == ({kind: 2} if kind else {})
    notes = [note for note in dataset_notes("validation", data) if "chat template is not" not in note]
    assert len(notes) == (1 if kind else 0)
    assert all(note.startswith("2 validation prompts ") for note in notes)


def test_a_tokenizer_that_ends_plain_text_is_named(jsonl, data_config, tokenizer_without_template):
    inner = Tokenizer.from_str(tokenizer_without_template.backend_tokenizer.to_str())
    end = inner.token_to_id("!")
    inner.post_processor = TemplateProcessing(single="^ $A !", special_tokens=[("^", 1), ("!", end)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", bos_token="^", eos_token="!")
    data = build_dataset(data_config(jsonl([{"prompt": "hi", "answer": "1"}])), tokenizer, "train")
    [note] = dataset_notes("training", data)
    assert "end with the tokenizer's end-of-sequence token" in note
    assert "set add_eos_token to false in its tokenizer_config.json" in note
