"""One reading of a row's ground truth, for every reward that compares, the judge, `data inspect` and the dry run."""

import datetime
import decimal
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwgrpo.catalog import REWARDS
from hwgrpo.data.reward_check import COMPARING, judge_rows
from hwgrpo.errors import DataError, RewardError
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.ground_truths import answer_text, is_missing, own_answer, right_answers, shown_answers
from hwgrpo.rewards.services.judge_replies import Template
from hwgrpo.rewards.signatures import load_function, make_reward_function
from hwgrpo.values import Prompt

DATE = datetime.date(2024, 2, 29)


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        ("18", ["18"]),
        (18, ["18"]),
        (18.0, ["18"]),
        (-0.0, ["0"]),
        (1e16, ["10000000000000000"]),
        (0.00001, ["0.00001"]),
        (1.5, ["1.5"]),
        (True, ["true"]),
        (["17", 18.0, False], ["17", "18", "false"]),
        (decimal.Decimal("18.50"), ["18.5"]),
        (decimal.Decimal("1E+3"), ["1000"]),
        (DATE, ["2024-02-29"]),
        (np.float64(18), ["18"]),
        (np.float32(0.1), ["0.1"]),
        (np.int64(7), ["7"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([18.0, 19.0]), ["18", "19"]),
        (torch.tensor([1, 2]), ["1", "2"]),
    ],
)
def test_a_ground_truth_is_one_or_several_texts(truth: Any, answers: list[str]):
    """By `str(value)`, right answers to 18.0, true or a list were scored 0."""
    assert right_answers(truth) == answers


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_keeps_its_value_and_has_neither_exponent_nor_a_point_without_digits(value: float):
    text = answer_text(value)
    assert float(text) == value
    assert "e" not in text.lower()
    assert not text.endswith((".", ".0"))


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "data.ground_truth_key"),
        (math.nan, "is nan, which is no answer"),
        (["18", None], "data.ground_truth_key"),
        (math.inf, "inf is not finite"),
        ([], "lists no right answer"),
        ([["18"]], "of type list; allowed: text, a number"),
        ({"value": "18"}, r"is a mapping, which is not read here.*ground_truth_key=reward_model.ground_truth.value"),
        (b"18", "of type bytes"),
    ],
)
def test_what_is_no_answer_is_an_error_of_every_comparing_reward(truth: Any, words: str):
    for name in COMPARING:
        with pytest.raises(DataError, match=words if not isinstance(truth, dict) else "is a mapping"):
            REWARDS.load(name)("1", truth)
    with pytest.raises(DataError, match=words):
        right_answers(truth)


def test_a_mapping_is_read_by_the_fields_that_a_reward_documents():
    assert right_answers({"target": [18.0], "other": 1}, ("target",)) == ["18"]
    with pytest.raises(DataError, match="read is its field 'target'"):
        REWARDS.load("question_f1")("1", {"answers": ["1"]})


def test_null_nan_and_an_empty_list_are_missing():
    assert all(map(is_missing, (None, math.nan, np.float32("nan"), decimal.Decimal("NaN"), [], np.array([]))))
    assert not any(map(is_missing, (0, False, "", [None], "nan", {})))


def test_an_error_of_a_ground_truth_names_the_row(reward_config, make_batch):
    with pytest.raises(RewardError, match=r"reward exact_match, prompt 0:1 of tests, .* is nan, which is no answer"):
        RewardPipeline(reward_config({"name": "exact_match"})).score(*make_batch([["1"], ["1"]], ["1", math.nan]))


def prompt(truth: Any) -> Prompt:
    return Prompt(uid="0", text="", token_ids=(1,), ground_truth=truth, columns={}, source="page", place="a.jsonl, 1")


@pytest.mark.parametrize("truth", ["18", 18, 18.0, ["18"], [17.0, 18.0], decimal.Decimal("18.0"), 1e16, 0.00001])
def test_the_check_of_data_and_the_rewards_agree_about_a_row(truth: Any):
    names = [name for name in COMPARING if name != "multiple_choice"]
    rewards = [make_reward_function(*load_function(name, name), {}, {}, name) for name in names]
    judged, unscored = judge_rows([prompt(truth)], rewards)
    assert unscored == {}
    assert [each.scored for each in judged] == [1] * len(names)


def test_the_check_of_data_lists_rows_whose_ground_truth_cannot_be_read():
    reward = make_reward_function(*load_function("exact_match", "x"), {}, {}, "x")
    _, unscored = judge_rows([prompt({"a": 1}), prompt("1"), prompt([None]), prompt([[1]])], [reward])
    assert sorted(unscored) == [0, 2, 3]
    question = make_reward_function(*load_function("question_f1", "x"), {}, {}, "x")
    assert judge_rows([prompt({"target": [18.0]})], [question])[1] == {}


@pytest.mark.parametrize("name", ["format", "tags"])
def test_the_check_of_data_tries_an_answer_in_the_format_that_a_reward_asks_for(name: str):
    (judged,), unscored = judge_rows([prompt("18")], [make_reward_function(*load_function(name, name), {}, {}, name)])
    assert (judged.scored, judged.failed, unscored) == (1, 0, {})


def test_a_response_that_is_the_answer_itself():
    assert [own_answer(truth) for truth in (18.0, [False], {"target": ["a"]}, None, math.nan)] == [
        "18", "false", "a", None, None,
    ]  # fmt: skip
    assert own_answer({"tests": [1.5]}) == '{"tests": [1.5]}'


def test_a_judge_is_shown_the_answer_as_the_rewards_read_it():
    template = Template("{response} {ground_truth}", Kwargs("judge"), "template", needs_response=True)
    assert template.fill(prompt(18.0), "r") == "r 18"
    assert template.fill(prompt(["18"]), "r") == "r 18"
    assert shown_answers([18.0, "x"]) == '["18", "x"]'
    assert shown_answers({"rubric": ["short"]}) == '{"rubric": ["short"]}'
    assert shown_answers([{"criterion": "short", "points": 2}]) == '[{"criterion": "short", "points": 2}]'
    assert shown_answers([["a", 1], "b"]) == '[["a", 1], "b"]'
    with pytest.raises(DataError, match=r"a.jsonl, 1: the row has no ground truth"):
        template.fill(prompt(None), "r")
    free = Template("{response}", Kwargs("judge"), "template", needs_response=True)
    assert free.fill(prompt(None), "r") == "r"
