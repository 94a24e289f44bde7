"""Tasks of the package reasoning-gym: their rows in any process, the package's scores, wrong addresses."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hwgrpo.catalog import REWARDS
from hwgrpo.config.schema import DataConfig, RewardFunctionConfig
from hwgrpo.data import reasoning_gym_rows
from hwgrpo.data.examples import build_examples
from hwgrpo.data.prompts import build_dataset
from hwgrpo.data.reasoning_gym_rows import rows_of, split_of_question, task_rows
from hwgrpo.data.sources import open_all
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.signatures import make_reward_function
from hwgrpo.rewards.verifiers.reasoning_gym_score import check_prompt, reasoning_gym
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import parse_address
from hwgrpo.values import Prompt
from tests.data.conftest import make_tokenizer

SUMS = (
    "reasoning_gym://basic_arithmetic?size=30&seed=1&operators=+&allow_parentheses=false"
    "&min_terms=2&max_terms=2&min_digits=2&max_digits=2&format_style=natural"
)


@pytest.fixture(autouse=True)
def _package(reasoning_gym_path):
    """Each test has the package on its path."""


def row_of(address):
    return rows_of(parse_address(address), "train")[0]


def test_rows_depend_on_no_hashes_of_this_process(monkeypatch):
    address = "reasoning_gym://polynomial_multiplication?size=4&seed=3"  # depends on the order of a set of strings
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append(task_rows.__wrapped__(address, "train"))
    assert made[0] == made[1]
    assert len(made[0]) == 4


def test_rows_depend_on_no_generator_of_this_process():
    made = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        made.append(rows_of(parse_address("reasoning_gym://list_functions?size=2"), "train"))
    assert made[0] == made[1]


def test_rows_are_those_of_the_package_and_have_its_entries():
    rows = open_all([SUMS, "reasoning_gym://chain_sum?size=5"], "any", "train")
    assert len(rows) == 35
    row = rows[3]
    left, right = row["prompt"].translate(str.maketrans("", "", "+?.:")).split()[-2:]
    assert int(left) + int(right) == int(row["ground_truth"])
    assert row["data_source"] == "reasoning_gym://basic_arithmetic"
    assert rows.place(31) == "reasoning_gym://chain_sum?size=5, row 1"
    assert json.loads(json.dumps(row)) == row
    assert row["extra_info"]["version"] == reasoning_gym_rows.version()
    package = parse_address(SUMS).dataset()
    assert row["extra_info"]["entry"] in [repr(package[index]) for index in range(len(package))]


def test_no_question_is_in_both_splits():
    splits = {split: {row["prompt"] for row in task_rows(SUMS, split)} for split in ("train", "validation")}
    assert all(splits.values())
    assert not splits["train"] & splits["validation"]
    validation = open_all(SUMS, "any", "validation")
    assert {row["prompt"] for row in validation} == splits["validation"]
    assert {split_of_question(prompt) for prompt in splits["train"]} == {"train"}


def test_the_tasks_own_answers_are_responses_for_supervised_training():
    address = "reasoning_gym://chain_sum?size=3"
    config = DataConfig(train=address, validation=address, response_key="ground_truth", max_prompt_tokens=200)
    for which in ("train", "validation"):
        examples = build_examples(config, make_tokenizer(), [], 20, which)
        assert examples is not None
        rows = rows_of(parse_address(address), which)
        texts = [row["prompt"] + row["ground_truth"] for row in rows]
        assert [examples.prompt(row, 0).text for row in range(3)] == texts
        lengths = [len(row["ground_truth"]) + 1 for row in rows]  # and the end of sequence
        assert [len(examples.prompt(row, 0).response_ids) for row in range(3)] == lengths


@pytest.mark.parametrize(("limit", "rows"), [(256, 3), (2, 2), (0, 3)])
@pytest.mark.parametrize("of_prompts", [True, False])
def test_a_task_has_a_validation_of_its_own(of_prompts, limit, rows):
    config = DataConfig(train=SUMS, response_key="ground_truth", max_prompt_tokens=200, validation_max_rows=limit)
    if of_prompts:
        read = build_dataset(config, make_tokenizer(), "validation")
    else:
        read = build_examples(config, make_tokenizer(), [], 20, "validation")
    assert read is not None
    assert len(read) == rows
    assert {split_of_question(read.prompt(row, 0).columns["prompt"]) for row in range(rows)} == {"validation"}


def test_another_version_of_the_package_is_another_data_set(monkeypatch):
    rows = rows_of(parse_address(SUMS), "train")
    assert rows == list(task_rows(SUMS, "train"))
    monkeypatch.setattr(reasoning_gym_rows, "version", lambda: "9.9")
    assert rows_of(parse_address(SUMS), "train") != rows


def test_a_task_that_searches_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(reasoning_gym_rows, "SECONDS", 0.01)
    with pytest.raises(DataError, match=r"chain_sum\?size=7: its rows for train are not made within 0.01 s"):
        task_rows("reasoning_gym://chain_sum?size=7", "train")


def test_a_task_with_too_few_questions_is_an_error_with_the_number_that_there_are():
    address = "reasoning_gym://count_bits?size=300&min_n=2&max_n=2"  # one question, of the split train
    with pytest.raises(DataError, match=r"size=300&.* no question for validation: .*wider"):
        task_rows(address, "validation")
    with pytest.raises(DataError, match=r"only 1 of 300 .* different .* wider or size smaller, at most 1$"):
        task_rows(address, "train")


def test_a_question_is_a_row_once():
    rows = rows_of(parse_address("reasoning_gym://count_bits?size=20&min_n=2&max_n=60"), "train")
    assert len({row["prompt"] for row in rows}) == len(rows) == 20


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("chain_sums", ["data.train=reasoning_gym://chain_sums: task='chain_sums'", "Did you mean 'chain_sum'?"]),
        ("composite", ["'composite' is not known"]),
        ("chain_sum?max_digit=2", ["argument='max_digit'", "seed, size", "Did you mean 'max_digits'?"]),
        ("chain_sum?max_digits=two", ["max_digits='two'", "a whole number", "4"]),
        ("chain_sum?size=0", ["size=0", "1 or more"]),
        ("chain_sum?seed", ["'seed' is not argument=value", "min_terms"]),
        ("chain_sum?allow_negation=1", ["allow_negation='1'", "true or false"]),
        ("chain_sum?min_terms=9", ["min_terms=9", "refuses", "max_terms must be >= min_terms"]),
        ("basic_arithmetic?operators=+,x", ["operators=+,x", "unsupported operator: x"]),
        ("word_sorting?transformation=upercase", ["transformation", "Did you mean 'uppercase'?"]),
        ("rearc?board_format_opts=a", ["board_format_opts='a'", "remove it"]),
    ],
)
def test_a_wrong_address_names_key_value_and_what_is_allowed(address, expected):
    with pytest.raises(ConfigError) as error:
        open_all(f"reasoning_gym://{address}", "any", "train")
    for part in expected:
        assert part in str(error.value)


def test_arguments_have_the_types_of_their_defaults():
    read = parse_address("reasoning_gym://word_sorting?transformation=uppercase").arguments["transformation"]
    assert (type(read).__name__, read.value) == ("TextTransformation", "uppercase")
    read = parse_address("reasoning_gym://basic_arithmetic?operators=+,%2D&allow_negation=false").arguments
    assert read == {"operators": ("+", "-"), "allow_negation": False}
    read = parse_address("reasoning_gym://codeio?difficulty=3&input_prediction_probability=1").arguments
    assert read == {"difficulty": 3, "input_prediction_probability": 1.0}
    assert isinstance(read["input_prediction_probability"], float)


@pytest.mark.parametrize(
    ("response", "arguments", "score"),
    [
        ("<answer>{}</answer>", {}, 1),
        ("<answer>1</answer> no, <answer> {} </answer>", {}, 1),
        ("{}", {}, 0),
        ("{}</answer>", {"opened_markers": "<answer>"}, 1),
        ("It is {}.", {"extract": "number"}, 1),
        ("7 + 5 = {}", {"extract": "number"}, 1),
        (r"\boxed{{{}}} of 3", {"extract": "number"}, 1),
        ("3 and <answer>{}</answer>, not 4", {"extract": "number"}, 1),
        ("<think>3</think>{}", {"extract": "number"}, 1),
        ("none", {"extract": "number"}, 0),
        ("{}e0", {"extract": "number"}, 1),
        ("{}e2", {"extract": "number", "partial": False}, 0),
        ("3/{}", {"extract": "number", "partial": False}, 0),
        ("1,{}", {"extract": "number"}, 0),
        ("-{}", {"extract": "number", "partial": False}, 0),
        (" {}\n", {"extract": "text"}, 1),
        ("{}{}", {"extract": "number", "partial": False}, 0),
        ("{}{}", {"extract": "number"}, 0.5),
        ("", {"extract": "text"}, 0),
    ],
)
def test_the_answer_of_a_response_is_scored_by_the_package(response, arguments, score):
    row = row_of(SUMS)
    truth = row["ground_truth"]
    text = response.format(truth, truth) if "{" in response else response
    assert reasoning_gym(text, row["extra_info"], **arguments) == score


@pytest.mark.parametrize(
    "task",
    [
        "arc_1d",
        "rearc",  # its entries have tuples, which the scorer compares
        "knights_knaves",  # texts of numpy
        "time_intervals",
        "prime_factorization",  # its scorer raises on text
    ],
)
def test_the_rows_own_answer_has_the_full_score_and_no_response_raises(task):
    row = row_of(f"reasoning_gym://{task}?size=2")
    assert reasoning_gym(row["ground_truth"], row["extra_info"], extract="text") == 1
    for response in ("", "(" * 500, "[[1,2],[3]]", "{}", "1/0", "\0é"):
        assert 0 <= reasoning_gym(response, row["extra_info"], extract="text") < 1


def test_a_row_of_another_source_is_refused_when_data_is_read():
    prompt = Prompt(
        uid="0", text="a", token_ids=(1,), ground_truth="1", columns={"extra_info": {"index": 1}}, source="a"
    )
    with pytest.raises(DataError, match=r"rows of reasoning_gym://.*extra_info=\{'index': 1\}"):
        check_prompt(prompt)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("entry", "{", "is no entry"),
        ("address", "task://sort", "extra_info.address='task://sort' .*reasoning_gym://.*data.train"),
        ("address", "reasoning_gym://nope", "extra_info.address=reasoning_gym://nope: task='nope' is not known"),
    ],
)
def test_a_broken_row_is_refused_when_data_is_read(field, value, message):
    columns = {"extra_info": {**row_of(SUMS)["extra_info"], field: value}}
    with pytest.raises(DataError, match=message):
        check_prompt(Prompt(uid="0", text="a", token_ids=(1,), ground_truth="1", columns=columns, source="a"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"extract": "numbr"}, "kwargs.extract.*Did you mean 'number'"), ({"partial": 1}, "kwargs.partial=1")],
)
def test_wrong_arguments_of_the_reward_are_refused_at_the_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_reward_function("reasoning_gym", REWARDS.load("reasoning_gym"), arguments, {}, "reward.functions[0]")


def test_the_reward_runs_in_a_process_of_its_own_with_a_timeout():
    row = row_of(SUMS)
    prompt = Prompt(uid="0", text="a", token_ids=(1,), ground_truth="1", columns=row, source=row["data_source"])
    setting = RewardFunctionConfig(name="reasoning_gym", kwargs={"extract": "text"}, timeout=60)
    with RewardPipeline(SimpleNamespace(functions=[setting])) as pipeline:
        [function] = pipeline.functions
        assert function.per_sample([prompt, prompt], [row["ground_truth"], "x"]) == [1.0, 0.0]
