"""The final answer in a published solution."""

import pytest

from hwgrpo.data.final_answers import last_boxed, number_after_mark
from hwgrpo.errors import DataError


@pytest.mark.parametrize(
    ("solution", "number"),
    [
        ("3*4=<<3*4=12>>12\n#### 12", "12"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### $1,080.50", "1080.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### .5", ".5"),
        ("####12 ", "12"),
        ("#### 30%", "30"),
        ("#### 18.", "18"),
        ("#### 7 apples", "7"),
        ("a guess: #### 3\nbut then\n#### 4", "4"),
    ],
)
def test_the_number_after_the_last_mark_is_taken_without_commas_and_dollars(solution, number):
    assert number_after_mark(solution) == number


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("it is 12", "no ####"),
        ("#### twelve", "no single number after ####"),
        ("12 ####", "no single number after ####"),
        ("#### 3/4", "no single number after ####"),
        ("#### 3 - 4", "no single number after ####"),
        ("#### 12:30", "no single number after ####"),
        ("#### 2^5", "no single number after ####"),
        ("#### 7th", "no single number after ####"),
        ("#### 1.2.3", "no single number after ####"),
        ("#### --3", "no single number after ####"),
    ],
)
def test_what_is_only_the_beginning_of_an_answer_is_refused(solution, reason):
    with pytest.raises(DataError) as error:
        number_after_mark(solution)
    assert str(error.value) == reason


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"$\boxed{1}$, no: $\boxed{2}$", "2"),
        (r"\boxed{\left\{ 1, \frac{a}{b} \right\}} and {more}", r"\left\{ 1, \frac{a}{b} \right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        (r"\fbox{7}", "7"),
        (r"it is $\boxed 7$.", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{\$18.90}", r"\$18.90"),
        (r"\boxed{1} in a \boxedminus{2}", "1"),
    ],
)
def test_the_last_box_is_taken_with_its_braces_balanced(solution, answer):
    assert last_boxed(solution) == answer


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("no box", "no \\boxed{}"),
        (r"\boxed{\frac{1}{2}", "the braces of the last \\boxed{} do not close"),
        (r"\boxed{1\}", "the braces of the last \\boxed{} do not close"),
        (r"\boxed{ }", "the last \\boxed{} is empty"),
        ("\\boxed", "the last \\boxed{} is empty"),
    ],
)
def test_a_solution_without_a_whole_box_is_refused(solution, reason):
    with pytest.raises(DataError) as error:
        last_boxed(solution)
    assert str(error.value) == reason
