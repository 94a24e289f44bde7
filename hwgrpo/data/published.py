"""Published datasets that `hwgrpo data` converts: source, columns, and the answer in a solution."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hwgrpo.errors import DataError


@dataclass(frozen=True)
class Published:
    """A dataset on the hub, and its conversion."""

    title: str
    hub: str
    """Its name on the hub, which rows carry as `data_source`: verl chooses its scorer by it."""
    subset: str | None
    """The hub's subset; None is its default one."""
    folders: tuple[str, ...]
    """Folders of this subset in a copy with several subsets."""
    other_versions: tuple[str, ...]
    """Parts of file names that mark other versions of the same rows."""
    files: tuple[str, ...]
    """Files to download by hand."""
    question: str
    """Column of the question."""
    solution: str
    """Column of the worked solution."""
    instruction: str
    """Text after every question, so that a response has its answer where the reward expects it."""
    answer: Callable[[str], str]
    """Worked solution -> ground truth."""
    reward: str
    """The built-in reward that scores it."""
    ability: str = "math"

    @property
    def page(self) -> str:
        """Web page of the dataset."""
        return f"https://huggingface.co/datasets/{self.hub}"


def published_with(columns: tuple[str, ...]) -> str | None:
    """Return the name of the published dataset that has these columns, or None."""
    return next((name for name, each in PUBLISHED.items() if {each.question, each.solution} <= set(columns)), None)


MARK = "####"
NUMBER = re.compile(r"\s*(-?)\s*\$?\s*(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
CONTINUES = re.compile(r"\w|[ \t]*[-+*/^:\u00d7]|\.\d")
"""What follows a number that is only the beginning of the answer: `3/4`, `2^5`, `12:30`, `7th`, `1.2.3`."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def number_after_mark(solution: str) -> str:
    """Return the number after the last `####`, without thousands' commas and `$`: `1080` of `#### $1,080`.

    Raises:
        DataError: there is no mark, or it is not followed by a single number.
    """
    _, mark, tail = solution.rpartition(MARK)
    if not mark:
        raise DataError(f"no {MARK}")
    match = NUMBER.match(tail)
    if match is None or CONTINUES.match(tail, match.end()):
        raise DataError(f"no single number after {MARK}")
    sign, digits = match.groups()
    if sign and digits.startswith("-"):
        raise DataError(f"no single number after {MARK}")
    return sign + digits.replace(",", "")


def last_boxed(solution: str) -> str:
    """Return the content of the last `\\boxed{}` or `\\fbox{}`, with balanced braces, or of `\\boxed 7$`.

    Raises:
        DataError: there is none, its braces do not close, or it is empty.
    """
    boxes = list(BOX.finditer(solution))
    if not boxes:
        raise DataError("no \\boxed{}")
    start = boxes[-1].end()
    if solution[start : start + 1] == "{":
        content = _braced(solution, start)
        if content is None:
            raise DataError("the braces of the last \\boxed{} do not close")
    else:
        content = re.split(r"[$\n]", solution[start:], maxsplit=1)[0]
    if not content.strip():
        raise DataError("the last \\boxed{} is empty")
    return content.strip()


def _braced(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing one; `\\{` and `\\}` do not count."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # whatever follows a backslash is part of a command
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


PUBLISHED = {
    "gsm8k": Published(
        title="GSM8K",
        hub="openai/gsm8k",
        subset="main",
        folders=("main",),
        other_versions=("socratic",),
        files=("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        question="question",
        solution="answer",
        instruction='Let\'s think step by step and output the final answer after "####".',
        answer=number_after_mark,
        reward="gsm8k",
    ),
    "math": Published(
        title="MATH",
        hub="DigitalLearningGmbH/MATH-lighteval",
        subset=None,
        folders=("data", "default"),
        other_versions=(),
        files=("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        question="problem",
        solution="solution",
        instruction="Let's think step by step and output the final answer within \\boxed{}.",
        answer=last_boxed,
        reward="math",
    ),
}
"""Name in `hwgrpo data` -> dataset."""


def reward_of(data_source: str) -> str | None:
    """Return the built-in reward that scores rows of a published dataset, or None for any other."""
    return next((each.reward for each in PUBLISHED.values() if each.hub == data_source), None)
