"""Verl's reward of Geometry3K: its numbers, its limit on time, and what it needs."""

import math
import random
import re
import sys
from itertools import product

import pytest

from hwgrpo.catalog import REWARDS
from hwgrpo.data.reward_check import check_rows, judge_rows
from hwgrpo.errors import ConfigError
from hwgrpo.rewards.signatures import make_reward_function
from hwgrpo.rewards.verifiers import geo3k as module
from hwgrpo.rewards.verifiers.by_source import by_source
from hwgrpo.rewards.verifiers.geo3k import geo3k, has_form
from hwgrpo.values import Prompt

VERL = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
ANSWERS = (
    *("12", "12.0", "1,200", "12 cm", r"12^\circ", r"12\%", r"\text{12}", "$12$", "x", "X", "A", "none", ""),
    *(r"\frac{1}{2}", r"\frac{2}{4}", "1/2", "0.5", "3 1/2", "3.5", r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt 8", "2.828"),
    *("(1, 2)", "(1,2)", "[1, 2]", "(2, 1)", "1 or 2", r"6\pi", r"\pi \cdot 6", "18.8", "2 million", "{", "(" * 300),
)


def test_numbers_are_those_of_mathruler_and_of_verls_pattern():
    from mathruler.grader import extract_boxed_content, grade_answer

    right = 0
    for answer, truth in product(ANSWERS, ANSWERS[:-2]):
        for response in (f"\\boxed{{{answer}}}", f"<think>\n</think>\n\\boxed{{0}} \\boxed{{{answer}}}", answer):
            accuracy = float(grade_answer(extract_boxed_content(response), truth))
            form = float(VERL.fullmatch(response) is not None)
            assert geo3k(response, truth, timeout=None) == (1 - 0.1) * accuracy + 0.1 * form, (response, truth)
            right += int(accuracy)
    assert 2 * len(ANSWERS) < right < len(ANSWERS) ** 2, "right and wrong answers are both compared"


def test_the_form_is_that_of_verls_pattern_in_any_order_of_its_parts():
    draw = random.Random(3)
    parts = ("<think>", "</think>", "\\boxed{", "}", "\n", "a", "{", "\\boxed", " ")
    texts = ["<think></think>\\boxed{}", *("".join(draw.choices(parts, k=draw.randint(3, 9))) for _ in range(9000))]
    texts += [f"<think>{text}" for text in texts]
    assert [has_form(text) for text in texts] == [VERL.fullmatch(text) is not None for text in texts]
    assert 100 < sum(map(has_form, texts)) < len(texts) / 2


def test_a_comparison_without_end_is_killed_and_the_next_one_is_made():
    endless = "<think></think>\\boxed{9**9**9**9}"  # a power that no signal interrupts
    assert geo3k(endless, "12.5", timeout=1) == 0.1
    assert geo3k("<think></think>\\boxed{\\sqrt{8}}", "2\\sqrt{2}") == 1
    assert by_source("hiyouga/geometry3k", "\\boxed{\\sqrt{8}}", ["7", "2\\sqrt{2}"]) == 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format_score": 1.5}, r"kwargs.format_score=1.5 of reward geo3k; allowed: 0 to 1"),
        ({"timeout": 0}, r"kwargs.timeout=0 of reward geo3k; allowed: seconds above 0, or null"),
        ({"timeout": math.nan}, "kwargs.timeout=nan"),
        ({"timeout": True}, "kwargs.timeout=true"),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_reward_function("geo3k", REWARDS.load("geo3k"), arguments, {}, "reward.functions[0]")


@pytest.mark.parametrize("missing", ["mathruler", "pylatexenc"])
def test_without_its_packages_the_error_says_how_to_install_them(missing, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "mathruler"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    module.grader.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf'(?s){missing}.*pip install "hwgrpo\[rewards\]"'):
            make_reward_function("geo3k", REWARDS.load("geo3k"), {}, {}, "reward.functions[0]")
        with pytest.raises(ConfigError, match=r"pip install"):
            by_source("hiyouga/geometry3k", "a", "b")
    finally:
        module.grader.cache_clear()


def test_rows_are_inspected_without_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "mathruler", None)
    for name in [name for name in sys.modules if name.startswith("mathruler.")]:
        monkeypatch.delitem(sys.modules, name)
    module.grader.cache_clear()
    row = Prompt(uid="0", text="a", token_ids=(1,), ground_truth="1", columns={}, source="hiyouga/geometry3k")
    try:
        [judged], unscored = judge_rows([row], None)
        assert check_rows([row], None) == ([], {})
    finally:
        module.grader.cache_clear()
    assert (judged.reward, judged.tried, unscored) == ("geo3k", 0, {})
    assert "pip install" in (judged.why_not or "")
