"""Responses to questions with numbers as answers, right and wrong ones in many styles, the same at every call."""

from __future__ import annotations

import random
from typing import NamedTuple

SIZE = 500


class Answered(NamedTuple):
    """A response."""

    style: str
    right: bool
    response: str
    truth: str


STYLES = {
    "#### N": "so {a} + {b} = {n}\n#### {n}",
    "#### N with separators": "That makes\n#### {n:,}",
    "#### N.00": "That makes\n#### {n}.00",
    "#### $N": "That makes\n#### ${n}",
    "#### N.": "That makes\n#### {n}.",
    "####N": "####{n}",
    "#### twice": "#### {other}\nNo.\n#### {n}",
    "last number": "First {a}, then {b}, so it is {n}",
    "last number and a period": "Since {a} + {b} is that, the answer is {n}.",
    "The answer is N units": "The answer is {n} apples",
    "Answer: N": "Answer: {n}",
    "Answer: $N$": "Answer: ${n}$",
    "boxed": "Thus \\boxed{{{n}}}.",
    "boxed formula": "Thus $\\boxed{{{n}}}$.",
    "boxed with separators": "\\boxed{{{n:,}}}",
    "boxed with text": "\\boxed{{{n} \\text{{ apples}}}}",
    "boxed sum": "\\boxed{{{n} + 0}}",
    "boxed fraction": "\\boxed{{\\frac{{{double}}}{{2}}}}",
    "boxed N.0": "\\boxed{{{n}.0}}",
    "boxed twice": "\\boxed{{{other}}}, no, \\boxed{{{n}}}",
    "boxed equation": "\\boxed{{x = {n}}}",
    "formula": "It is ${n}$.",
    "think and box": "<think>\n{a} + {b}\n</think>\n\\boxed{{{n}}}",
    "think and answer": "<think>{a} + {b}</think><answer>{n}</answer>",
    "think twice": "<think>{a}<think>{b}</think>\\boxed{{{n}}}",
    "think after text": "Well. <think>{a}</think>\\boxed{{{n}}}",
    "think on a later line": "Well.\n<think>{a}</think>\\boxed{{{n}}}",
    "answer in prose": "<answer>The {n}!</answer>",
    "box far from the end": "\\boxed{{{n}}}" + " and that is all there is to say" * 12,
    "no answer": "I do not know.",
    "nothing": "",
}


def corpus() -> list[Answered]:
    """Return `SIZE` responses, each style in turn, two of three right."""
    draw = random.Random(7)
    answers = []
    for number in range(SIZE):
        style = list(STYLES)[number % len(STYLES)]
        a, b = draw.randint(-900, 4000), draw.randint(2, 4000)
        truth, right = a + b, draw.random() < 2 / 3
        n = truth if right else truth + draw.randint(1, 9)
        response = STYLES[style].format(a=a, b=b, n=n, other=n + 11, double=2 * n)
        answers.append(Answered(style, right, response, str(truth)))
    return answers
