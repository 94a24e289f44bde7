import pytest

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.verifiable import exact_match, format_reward, length_reward
from hwgrpo.rewards.verifiers.by_source import by_source
from hwgrpo.rewards.verifiers.gsm8k import gsm8k


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [("1234", "1234", 1), (" 1234\n", "1234 ", 1), ("12 34", "1234", 0), ("", "1", 0), ("7", 7, 1), ("A", "a", 0)],
)
def test_exact_match_compares_all_but_the_white_space_around(response, truth, reward):
    assert exact_match(response, truth) == reward


@pytest.mark.parametrize("reward", [exact_match, gsm8k])
def test_a_row_without_ground_truth_is_an_error_that_names_the_setting(reward):
    with pytest.raises(DataError, match=r"data\.ground_truth_key"):
        reward("1", None)


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("so\n#### 18", "18", 1),
        ("#### 17\nno,\n#### 18", "18", 1),
        ("#### 18\nno,\n#### 17", "18", 0.25),
        ("#### 1,080", "1080", 1),
        ("#### $18", "18", 1),
        ("#### -$3.50", "-3.5", 1),
        ("#### 18.", "18", 1),
        ("####18", "18", 1),
        ("the answer is 18", "18", 0),
        ("#### eighteen", "18", 0),
        ("", "18", 0),
        ("#### 3", "#### 3", 1),
        ("#### 3", "3 + 4 = 7, of which #### 3", 1),
        ("#### -18", "18", 0.25),
        ("#### 101", "#### 101_{2}", 1),
    ],
)
def test_gsm8k_compares_the_last_marked_number(response, truth, reward):
    assert gsm8k(response, truth, format_score=0.25) == reward


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("so\n#### 18", "18", 1),
        ("#### 18\nno,\n#### 17", "18", 0.25),
        ("#### 1,080", "1080", 1),
        ("#### 1,080.00", "1080", 0.25),
        ("#### 18.", "18", 0.25),
        ("#### 18", 18.0, 1),
        ("#### 18", ["17", "18"], 1),
        ("#### 18", "#### 18", 0.25),
        ("#### 18", "none", 0.25),
        ("#### $18", "18", 0),
        ("####18", "18", 0),
        ("####  18", "18", 0),
        ("#### \u0661\u0668", "18", 0),
        ("#### 18" + "." + " " * 292, "18", 0.25),
        ("#### 18" + " " * 293, "18", 1),
        ("#### 18" + " " * 294, "18", 0),
    ],
)
def test_gsm8k_strict_compares_the_text_near_the_end(response, truth, reward):
    assert gsm8k(response, truth, method="strict", format_score=0.25) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("17, no, 18", 1),
        ("18 then 17", 0.25),
        ("#### 18", 1),
        ("18 . or . so", 1),
        (". . .", 0.25),
        ("18 , or so", 0.25),
        ("it is $18.", 0.25),
        ("none", 0),
        ("18" + " " * 299, 0.25),
    ],
)
def test_gsm8k_flexible_compares_the_last_number_of_all(response, reward):
    assert gsm8k(response, "18", method="flexible", format_score=0.25) == reward


def test_the_source_of_gsm8k_has_verls_rule_and_sources_name_another():
    assert by_source("openai/gsm8k", "#### 18", "18") == 1
    assert by_source("openai/gsm8k", "#### $18.00", "18") == 0
    assert by_source("openai/gsm8k", "#### $18.00", "18", sources={"openai/gsm8k": "gsm8k"}) == 1
    assert (by_source("aime2024", "none", "18"), by_source("HuggingFaceH4/MATH-500", "none", "18")) == (-1, 0)


def test_gsm8k_gives_the_configured_score():
    assert gsm8k("#### 18", "18", score=2.5) == 2.5


def test_gsm8k_refuses_an_unknown_method():
    with pytest.raises(ConfigError, match=r"kwargs.method of reward gsm8k='strikt'.*Did you mean 'strict'"):
        gsm8k("#### 1", "1", method="strikt")


def test_gsm8k_refuses_a_ground_truth_without_a_number():
    with pytest.raises(DataError, match="'none' contains no number"):
        gsm8k("#### 1", "none")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think><answer>c</answer>", 1),
        ("\n<think></think>\n\n<answer>1 < 2</answer> ", 1),
        ("<think>a</think> so <answer>c</answer>", 0),
        ("<answer>c</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>c</answer> more", 0),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0),
        ("<think>a<think>b</think><answer>c</answer>", 0),
    ],
)
def test_the_default_form_is_think_then_answer_each_once_and_nothing_else(response, reward):
    assert format_reward(response) == reward


def test_the_form_can_be_other_tags_or_a_pattern():
    assert format_reward("<plan>p</plan>", tags=["plan"], score=0.5) == 0.5
    assert format_reward("<think>p</think>", tags=["plan"]) == 0
    assert format_reward("ab\n12", pattern=r"[a-z]+.\d+") == 1
    assert format_reward("ab\n12!", pattern=r"[a-z]+.\d+") == 0


def test_a_broken_pattern_is_refused():
    with pytest.raises(ConfigError, match=r"kwargs.pattern='\(' of reward format is no regular expression"):
        format_reward("x", pattern="(")


def test_the_length_punishment_has_the_published_values(make_batch):
    batch, completions = make_batch([["x" * 900, "x" * 1000, "x" * 1024, "x" * 1100], ["x" * 768, "x"]])
    golden = [-0.515625, -0.90625, -1.0, -1.0, 0.0, 0.0]
    assert length_reward(batch, completions, max_response_tokens=1024, buffer=256) == golden
    assert length_reward(batch, completions, max_response_tokens=1024) == golden
    golden[3] = -1.296875
    assert length_reward(batch, completions, max_response_tokens=1024, buffer=256, floor=False) == golden
    halved = [value / 2 for value in golden]
    assert length_reward(batch, completions, max_response_tokens=1024, factor=0.5, floor=False) == halved


@pytest.mark.parametrize("buffer", [0, 1025])
def test_a_length_buffer_outside_the_limit_is_refused(buffer, make_batch):
    with pytest.raises(ConfigError, match=f"kwargs.buffer={buffer}.*1 to max_response_tokens=1024"):
        length_reward(*make_batch([["x"]]), max_response_tokens=1024, buffer=buffer)
