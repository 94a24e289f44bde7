"""Rewards of 500 made-up answers beside verl's and TRL's: every difference is in a class that is listed here."""

import contextlib
import io
import random
from collections.abc import Callable, Iterable

import pytest

from hwgrpo.rewards.mathematics import math
from hwgrpo.rewards.verifiable import format_reward, length_reward
from hwgrpo.rewards.verifiers.by_source import by_source
from hwgrpo.rewards.verifiers.cosine_length import length_cosine
from hwgrpo.rewards.verifiers.gsm8k import gsm8k
from hwgrpo.rewards.verifiers.numeric import numeric
from hwgrpo.rewards.verifiers.question_answers import question_exact_match
from hwgrpo.rewards.verifiers.repetition import repetition
from tests.peers.answer_corpus import SIZE, Answered, corpus
from tests.peers.peer_rewards import trl_reward, verl_reward
from tests.support.numbers import response_batch

pytestmark = pytest.mark.slow

RIGHT_ONLY_HERE, RIGHT_ONLY_THERE = (1.0, 0.0), (0.0, 1.0)
SHAPES = {
    "numbers as text": ("#### N with separators", "#### N.", "#### N.00", "#### $N", "boxed N.0",
                        "boxed with separators"),
    "no space": ("####N",),
    "without a box": ("#### N", "#### twice", "#### $N", "#### N with separators", "#### N.", "#### N.00", "Answer: N",
                      "Answer: $N$", "The answer is N units", "formula", "last number", "last number and a period",
                      "answer in prose"),
    "computed": ("boxed sum", "boxed fraction"),
    "two boxes": ("boxed twice",),
    "far from the end": ("box far from the end",),
    "text in the box": ("boxed with text", "boxed equation"),
    "the answer's tag": ("think and answer",),
}  # fmt: skip
"""What distinguishes answers -> styles of the corpus."""
Scores = Callable[[Answered], float]


def differences(ours: Scores, theirs: Scores) -> dict[tuple[str, float, float], int]:
    """Return how many answers of a style have two different rewards, (style, ours, theirs) -> number."""
    found: dict[tuple[str, float, float], int] = {}
    for answer in corpus():
        pair = float(ours(answer)), float(theirs(answer))
        if pair[0] != pair[1]:
            found[answer.style, *pair] = found.get((answer.style, *pair), 0) + 1
    return found


def listed(*classes: tuple[str, tuple[float, float]], but: Iterable[str] = ()) -> set[tuple[str, float, float]]:
    """Return the differences that classes allow, without some styles."""
    return {(style, *pair) for shape, pair in classes for style in SHAPES[shape] if style not in but}


def verl_dapo(answer: Answered) -> float:
    return float(verl_reward("math_dapo").compute_score(answer.response, answer.truth)["acc"])


def verl_math_verify(answer: Answered) -> float:
    return verl_reward("math_verify")._verify_in_subprocess(f"\\boxed{{{answer.truth}}}", answer.response)


def verl_question(answer: Answered) -> float:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints samples
        return verl_reward("search_r1_like_qa_em").compute_score(answer.response, {"target": answer.truth})


def trl_accuracy(answer: Answered) -> float:
    solution = [f"\\boxed{{{answer.truth}}}"]
    return trl_reward("accuracy_rewards").accuracy_reward([[{"content": answer.response}]], solution)[0]


def trl_format(answer: Answered) -> float:
    return trl_reward("format_rewards").think_format_reward([[{"content": answer.response}]])[0]


def our_math(answer: Answered) -> float:
    return math(answer.response, answer.truth)


def test_the_corpus_has_right_and_wrong_answers_of_every_style():
    answers = corpus()
    assert len(answers) == SIZE == 500
    assert answers == corpus()
    assert {(each.style, each.right) for each in answers} == {
        (each.style, right) for each in answers for right in (0, 1)
    }


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("format_score", [0.0, 0.25])
def test_gsm8k_of_verl_is_the_same(method: str, format_score: float):
    """verl's ground truths are text; it compares nothing else."""
    kwargs = {"method": method, "format_score": format_score}
    assert differences(
        lambda answer: gsm8k(answer.response, answer.truth, **kwargs),
        lambda answer: verl_reward("gsm8k").compute_score(answer.response, answer.truth, **kwargs),
    ) == {}  # fmt: skip


def test_gsm8k_of_verl_is_the_same_on_strings_of_its_signs():
    """Random strings of the signs that the two patterns distinguish, around the length that verl searches."""
    draw = random.Random(11)
    theirs = verl_reward("gsm8k").compute_score
    for method in ("strict", "flexible"):
        scores = set()
        for _ in range(4000):
            end = " " * draw.choice((0, 290, 298))
            response = "".join(draw.choices(("#### ", "##", "$", "1", "8", ",", ".", "-", " ", "\n", "a"), k=8)) + end
            truth = draw.choice(("1", "8", "18", "-1", "1.8"))
            score = gsm8k(response, truth, method=method, format_score=0.25)
            assert score == theirs(response, truth, method=method, format_score=0.25), response
            scores.add(score)
        assert scores == {0.0, 0.25, 1.0}


def test_the_source_of_gsm8k_is_scored_as_verl_does():
    assert differences(
        lambda answer: by_source("openai/gsm8k", answer.response, answer.truth),
        lambda answer: verl_reward("gsm8k").compute_score(answer.response, answer.truth),
    ) == {}  # fmt: skip


def test_gsm8k_by_value_beside_verl():
    """`1080.00`, `$18` and `18.` are 1080 and 18 by value, and `####18` has its number."""
    found = differences(
        lambda answer: gsm8k(answer.response, answer.truth),
        lambda answer: verl_reward("gsm8k").compute_score(answer.response, answer.truth),
    )
    assert found.keys() == listed(
        ("numbers as text", RIGHT_ONLY_HERE), ("no space", RIGHT_ONLY_HERE),
        but=("boxed N.0", "boxed with separators", "#### N with separators"),
    )  # fmt: skip


def test_math_of_verl():
    """verl's older function compares the last box as text, after some rules; nothing is computed."""
    found = differences(
        our_math, lambda answer: verl_reward("math_reward").compute_score(answer.response, answer.truth)
    )
    assert found.keys() == listed(
        ("without a box", RIGHT_ONLY_HERE), ("computed", RIGHT_ONLY_HERE), ("numbers as text", RIGHT_ONLY_HERE),
        ("two boxes", RIGHT_ONLY_THERE),  # math-verify reads them as one answer of two numbers
    )  # fmt: skip


def test_dapo_of_verl():
    """As text, too; it reads `Answer:` first and then the box, of which it wants the bare number near the end."""
    assert differences(our_math, verl_dapo).keys() == listed(
        ("without a box", RIGHT_ONLY_HERE), ("computed", RIGHT_ONLY_HERE), ("numbers as text", RIGHT_ONLY_HERE),
        ("text in the box", RIGHT_ONLY_HERE), ("far from the end", RIGHT_ONLY_HERE), ("two boxes", RIGHT_ONLY_THERE),
        but=("Answer: N", "Answer: $N$"),
    )  # fmt: skip


def test_math_verify_of_verl_is_the_same():
    assert differences(our_math, verl_math_verify) == {}


def test_numbers_beside_math_verify():
    """`numeric` computes nothing but fractions; it takes the last of two boxes, reads `####N` and the answer's tag."""
    found = differences(lambda answer: numeric(answer.response, answer.truth), verl_math_verify)
    assert found.keys() == listed(
        ("no space", RIGHT_ONLY_HERE), ("two boxes", RIGHT_ONLY_HERE), ("the answer's tag", RIGHT_ONLY_HERE)
    ) | {("boxed sum", *RIGHT_ONLY_THERE)}


def test_questions_of_verl():
    """verl wants `<answer>`; here a response without it is the answer, and `####18` is 18 without punctuation."""
    found = differences(lambda answer: question_exact_match(answer.response, answer.truth), verl_question)
    assert found.keys() == listed(("no space", RIGHT_ONLY_HERE))


def test_accuracy_of_trl():
    """TRL wants LaTeX, a box or a formula that is announced; math-verify here also reads plain numbers."""
    assert differences(our_math, trl_accuracy).keys() == listed(
        ("without a box", RIGHT_ONLY_HERE), but=("Answer: $N$",)
    )


def test_the_format_of_trl_is_a_pattern_here():
    """TRL's pattern, which allows one `<think>`."""
    pattern = r"<think>(?!.*<think>).*?</think>.*"
    assert differences(lambda answer: format_reward(answer.response, pattern=pattern), trl_format) == {}


def test_penalties_of_trl_are_the_same():
    answers = corpus()
    batch, completions = response_batch.of([answer.response for answer in answers])
    ids = [list(map(ord, answer.response)) for answer in answers]
    others = trl_reward("other_rewards")
    for size in (1, 3, 8):
        theirs = others.get_repetition_penalty_reward(size, -0.5)(completion_ids=ids)
        assert repetition(batch, completions, ngram_size=size, max_penalty=-0.5) == pytest.approx(theirs, abs=1e-14)
    theirs = others.get_soft_overlong_punishment(60, 40)(completion_ids=ids)
    assert len({round(value, 6) for value in theirs}) > 10
    assert length_reward(batch, completions, max_response_tokens=60, buffer=40) == pytest.approx(theirs, abs=1e-14)


def test_the_cosine_reward_of_trl_is_the_same_where_correctness_is():
    accuracy = trl_reward("accuracy_rewards")
    answers = [each for each in corpus() if our_math(each) == trl_accuracy(each)][:120]
    theirs = accuracy.get_cosine_scaled_reward(50)(
        [[{"content": each.response}] for each in answers],
        [f"\\boxed{{{each.truth}}}" for each in answers],
        [list(map(ord, each.response)) for each in answers],
    )
    ours = [
        length_cosine(*response_batch.of([each.response], each.truth), correct="math", max_response_tokens=50)[0]
        for each in answers
    ]
    assert ours == pytest.approx(theirs, abs=1e-14)
    assert {0.5 < value < 1 for value in theirs} == {-1 < value < -0.5 for value in theirs} == {True, False}
