"""Published datasets that `hwgrpo data` converts: where they are, their columns, and the answer within a solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hwgrpo.data.answers import last_boxed, number_after_mark


@dataclass(frozen=True)
class Published:
    """A dataset as its hub stores it, and what becomes of it."""

    title: str
    hub: str
    """Its name on the hub, which rows carry as `data_source`: verl chooses its scorer by it."""
    subset: str | None
    """The hub's subset; None is its default one."""
    folders: tuple[str, ...]
    """Folders of a copy that hold that subset where others lie beside it."""
    other_versions: tuple[str, ...]
    """Words in file names of other versions of the same rows."""
    files: tuple[str, ...]
    """What to download by hand."""
    question: str
    """Column of the question."""
    solution: str
    """Column of the worked solution."""
    instruction: str
    """Follows every question, so that a response has its answer where the reward looks."""
    answer: Callable[[str], str]
    """Worked solution -> ground truth."""
    reward: str
    """The built-in reward that scores it."""
    ability: str = "math"

    @property
    def page(self) -> str:
        """Where people download it."""
        return f"https://huggingface.co/datasets/{self.hub}"


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
"""By the name that `hwgrpo data` has for them."""


def reward_of(data_source: str) -> str | None:
    """Return the built-in reward that scores rows of a published dataset, or None for any other."""
    return next((each.reward for each in PUBLISHED.values() if each.hub == data_source), None)


def published_with(columns: tuple[str, ...]) -> str | None:
    """Return the name of the published dataset that has these columns, or None."""
    return next((name for name, each in PUBLISHED.items() if {each.question, each.solution} <= set(columns)), None)
