"""The rule-based rewards on any response: finite values in linear time. docs/rewards.md has what they score."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.verifiers.json_schema import NO_JSON, json_document
from hwgrpo.rewards.verifiers.language import script_of
from hwgrpo.rewards.verifiers.multiple_choice import chosen_letter, multiple_choice
from hwgrpo.rewards.verifiers.numeric import final_quantity, numeric
from hwgrpo.rewards.verifiers.question_answers import question_exact_match, question_f1
from hwgrpo.rewards.verifiers.repetition import repeated_share
from tests.support.numbers import response_batch

PER_RESPONSE: dict[str, dict[str, Any]] = {
    "exact_match": {"ground_truth": "18"},
    "gsm8k": {"ground_truth": "18", "method": "flexible"},
    "format": {},
    "multiple_choice": {"ground_truth": "B"},
    "numeric": {"ground_truth": "9.81 m/s^2", "prefixes": True},
    "question_exact_match": {"ground_truth": ["Paris", "the city"]},
    "question_f1": {"ground_truth": ["Paris", "the city"]},
    "regex": {"ground_truth": r"[0-9]+$"},
    "tags": {},
    "language": {"language": "en"},
}
FRAGMENTS = (
    *("\\boxed{", "\\frac{", "{", "}", "\\text{", "$", "answer is ", "Answer: ", "option ", "#### ", "<answer>", "b"),
    *("</answer>", "<think>", "</think>", "A", "(B)", " or ", "1", ",234", ".5", "e9", "/", "^", "-", "%", "²", "½"),
    *("\\times 10^", "```", "~~~json\n", "[", '"', "答", "é", "\u202e", "\x00", "١", "\\(", "\\)", "= ", "*", "\n"),
)  # fmt: skip
REPEATED = (
    *("1", ",234", "1/", "1^", "1 ", "-", "^", "$", "\\(", "\\boxed{", "\\frac{1}{", "answer", "answer is "),
    *("a ", "A or ", "Answer: B or A, ", "#### ", "<answer>", "<think>", "```", " ", "\n", "x",
      "_", "__1", "1'000", "1\\,", "–", "1.1.", "\\boxed ", "\\fbox{", "A$", "US\\$1"),
)  # fmt: skip
"""Texts whose repetition takes patterns with nested or overlapping repeats quadratic time."""
RESPONSES = st.text(max_size=60) | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)
SIZE = 300_000


@settings(max_examples=300, deadline=None)
@given(RESPONSES)
def test_any_response_has_a_finite_reward(response: str):
    for name, arguments in PER_RESPONSE.items():
        value = REWARDS.load(name)(solution_str=response, **arguments)
        assert type(value) is float, name
        assert math.isfinite(value), name
    json_document(response)


@settings(max_examples=100, deadline=None)
@given(st.lists(RESPONSES, min_size=1, max_size=3))
def test_any_batch_has_finite_rewards(responses: list[str]):
    batch, completions = response_batch.of(responses)
    for name, arguments in (("length_cosine", {"correct": "numeric"}), ("length", {})):
        values = REWARDS.load(name)(batch, completions, max_response_tokens=9, **arguments)
        assert all(map(math.isfinite, values))
    assert all(-1 <= value <= 0 for value in REWARDS.load("repetition")(batch, completions))


@pytest.mark.timeout(60)  # some seconds, where one text in quadratic time takes minutes
@pytest.mark.parametrize("name", [name for name in PER_RESPONSE if name not in ("exact_match", "regex")])
def test_the_time_is_linear_in_the_length(name: str):
    reward, arguments = REWARDS.load(name), PER_RESPONSE[name]
    for fragment in REPEATED:
        repeated = (fragment * SIZE)[:SIZE]
        for text in (f"answer{repeated}5", f"\\boxed{{1{repeated}."):
            assert math.isfinite(reward(solution_str=text, **arguments))


@pytest.mark.timeout(60)
def test_json_is_found_in_linear_time():
    for fragment in ("[", "{", '{"a":', "```\n", "~~~\n```\n", "9", '"'):
        assert json_document((fragment * SIZE)[:SIZE]) is NO_JSON or fragment == "9"


@pytest.mark.parametrize(
    ("name", "truth", "words"),
    [
        ("numeric", "none", "'none' contains no number"),
        ("numeric", "1,2", "'1,2' contains no number"),
        ("numeric", None, "data.ground_truth_key"),
        ("multiple_choice", "Paris", "'Paris' is none of the letters A to Z"),
        ("multiple_choice", 1, "'1' is none of the letters"),
        ("question_f1", [], "lists no right answer"),
        ("question_f1", [None], "data.ground_truth_key"),
        ("question_exact_match", None, "data.ground_truth_key"),
        ("regex", "(", "is no regular expression"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_an_error(name: str, truth: Any, words: str):
    with pytest.raises(DataError, match=words):
        REWARDS.load(name)("1", truth)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("numeric", {"rel_tol": -1.0}, "rel_tol=-1.0"),
        ("multiple_choice", {"options": 1}, "options=1.*2 to 26"),
        ("regex", {"pattern": "("}, r"kwargs.pattern='\('"),
        ("regex", {"pattern": "a", "mode": "serach"}, "Did you mean 'search'"),
    ],
)
def test_an_argument_out_of_range_is_refused(name: str, arguments: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        REWARDS.load(name)("1", "1", **arguments)


def test_arguments_of_rewards_without_ground_truth_are_checked(make_batch):
    batch = make_batch([["a"]])
    for name, arguments, words in (
        ("repetition", {"ngram_size": 0}, "ngram_size=0"),
        ("repetition", {"max_penalty": 0.5}, "max_penalty=0.5"),
        ("length_cosine", {"correct": "maths", "max_response_tokens": 4}, "Did you mean 'math'"),
        ("length_cosine", {"correct": "math", "max_response_tokens": 0}, "max_response_tokens=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            REWARDS.load(name)(*batch, **arguments)
    for arguments, words in (
        ({}, "kwargs.language"),
        ({"language": "xx"}, "language='xx' is not known"),
        ({"scripts": ["latn"]}, "Did you mean 'latin'"),
    ):
        with pytest.raises(ConfigError, match=words):
            REWARDS.load("language")("a", **arguments)
    with pytest.raises(ConfigError, match="tags is empty"):
        REWARDS.load("tags")("a", tags=[])


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is **C**.", "C"),
        ("Therefore, the answer to the question is: D", "D"),
        ("My choice: (c)", "C"),
        ("The answer should be option B because A is false", "B"),
        ("The answer is A, B is wrong", "A"),
        ("The answer is A, B", None),
        ("The answer is A and C.", None),
        ("The answer is (A) or (B)", None),
        ("Answer: A. Answer: B.", None),
        ("\\boxed{A, C}", None),
        ("$\\boxed{\\mathrm{D}}$", "D"),
        ("\\boxed{12}", None),
        ("Answer: I think so", None),
        ("The answer is A dog", None),
        ("Answer: I", "I"),
        ("Answer: C++", None),
        ("<answer>\n(B)\n</answer>", "B"),
        ("<answer>A</answer><answer>B</answer>", None),
        ("Option A is wrong.\nC", "C"),
        ("The answer is unclear.\n\nAll of them", None),
        ("", None),
        ("B\nC", "C"),
    ],
)
def test_the_chosen_letter(response: str, letter: str | None):
    assert chosen_letter(response, "ABCDEFGHIJ") == letter


def test_letters_beyond_the_options_are_no_choice():
    assert multiple_choice("Answer: E", "D", options=4) == 0
    assert chosen_letter("Answer: E\n", "ABCD") is None
    with pytest.raises(DataError, match="A to D"):
        multiple_choice("Answer: E", "E", options=4)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("x-5", 5),
        ("from 2020-24", 24),
        ("it is -.5", -0.5),
        ("v1.2.3", None),
        ("2^{10}", 1024),
        ("\\boxed{2^{-1}}", 0.5),
        ("10⁶", 1e6),
        ("1e400", None),
        ("1/0", None),
        ("3/4 of it", 0.75),
        ("\\boxed{x = \\frac12}", 0.5),
        ("\\boxed{5\\text{ m}^2}", 5),
        ("The answer is 3 * 4 = 12 apples in 2 bags", 12),
        ("The answer is 12 apples in 2 bags", 12),
        ("#### 12 in 2 bags\nand 3", 12),
        ("<answer>7</answer> or 8", 7),
        ("<think>\\boxed{1}</think> 2", 2),
        ("1,234,567", 1234567),
        ("1,23,456", None),
        ("5, and that is it", 5),
        ("no number", None),
        ("it is –5", -5),
        ("from 3 –5", 5),
        ("_18_ eggs, x_1 = 3_", 3),
        ("it is __18 dollars__", 18),
        ("__Answer: 18__", 18),
        ("\\boxed{101_{2}}", 101),
        ("\\boxed{(101)_2}", 101),
        ("(101)_2", 101),
        ("5 is (101)_2 = 101_{2}", 101),
        ("1’000", 1000),
        ("\\boxed{1\\ 000}", 1000),
        ("A$18", 18),
        ("\\fbox {7} and 8", 7),
        ("on 1.2.2024", None),
        ("3\\frac12", 0.5),
        ("the answer is 10-2=8", 8),
        ("The answer is 3–5 days", None),
        ("**Answer**: − 5", 5),
        ("#### − 5", -5),
        ("<answer>\n- 5\n</answer>", 5),
    ],
)
def test_the_final_number(response: str, value: float | None):
    found = final_quantity(response)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("5 km/h", "5 km", 0.25),
        ("5 km.", "5 km", 1),
        ("5 m / s", "5 m/s", 1),
        ("5000 mW", "5 W", 1),
        ("5 MW", "5 mW", 0.25),
        ("5000 ms", "5 m", 0.25),
        ("3 µm", "0.003 mm", 1),
        ("18%", "18", 1),
        ("0.18", "18", 0.25),
        ("0.18", "18%", 1),
        ("18 percent", "18%", 1),
    ],
)
def test_units_and_percent(response: str, truth: str, reward: float):
    assert numeric(response, truth, prefixes=True, format_score=0.25) == reward


def test_the_right_answers_of_a_row_may_be_listed_as_verl_lists_them():
    assert question_exact_match("NYC", {"target": ["New York", "NYC"]}) == 1
    assert question_f1("new york", {"target": ["New York City", "NYC"]}) == pytest.approx(0.8)


def test_a_repeated_share_of_long_ngrams():
    assert repeated_share([1, 2, 3, 4] * 3, 4) == pytest.approx(1 - 4 / 9)
    assert repeated_share([1, 2, 3], 4) == 0


@pytest.mark.parametrize(
    ("letters", "script"),
    [
        ("aÉß", "latin"),
        ("жЁ", "cyrillic"),
        ("漢々", "han"),
        ("ぁ", "hiragana"),
        ("ア", "katakana"),
        ("ー1²_\u0301", ""),
    ],
)
def test_scripts(letters: str, script: str):
    assert {script_of(letter) for letter in letters} <= {script}


def test_the_cosine_reward_of_a_row_whose_ground_truth_cannot_be_used_is_an_error(make_batch):
    with pytest.raises(DataError, match="contains no number"):
        REWARDS.load("length_cosine")(*make_batch([["1"]], ["none"]), correct="numeric", max_response_tokens=4)


def test_the_cosine_reward_takes_a_function_of_ones_own(make_batch, reward_file):
    path = reward_file(
        """
        def f(completions, **columns):
            return [{"a": 1, "b": 0}.get(text) for text in completions]
        """
    )
    batch = make_batch([["a", "b", "?"]])
    values = REWARDS.load("length_cosine")(*batch, correct=f"{path}:f", max_response_tokens=2)
    assert values == pytest.approx([0.75, -0.75, None])
