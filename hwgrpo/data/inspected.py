"""What an inspection of data files found: values for people and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hwgrpo.data.reward_check import Judged


@dataclass(frozen=True)
class BadRow:
    """A row that the trainer would refuse, or that no response could be rewarded on."""

    index: int
    """From 0."""
    place: str
    reason: str


@dataclass(frozen=True)
class Lengths:
    """Lengths of the prompts of a file."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class Repeat:
    """A prompt that an earlier row has, too; white space aside."""

    place: str
    earlier: str


@dataclass(frozen=True)
class FileReport:
    """What one file holds."""

    name: str
    rows: int
    columns: Sequence[str]
    prompts: Mapping[str, int]
    """Kind of prompt -> rows."""
    ground_truths: Mapping[str, int]
    """Column of the answer -> rows."""
    unanswered: int
    """Rows without an answer."""
    sources: Mapping[str, int]
    """data_source -> rows."""
    characters: Lengths | None
    tokens: Lengths | None
    overlong: int | None
    """Prompts longer than `data.max_prompt_tokens`; None where tokens are not counted."""
    repeats: Sequence[Repeat]
    bad: Sequence[BadRow]
    judged: Sequence[Judged]


@dataclass(frozen=True)
class Overlap:
    """Prompts that two files share."""

    files: tuple[str, str]
    prompts: int
    places: tuple[str, str]
    """Where the first of them is in each."""


@dataclass(frozen=True)
class Inspection:
    """What several files hold."""

    files: Sequence[FileReport]
    overlaps: Sequence[Overlap]
    max_prompt_tokens: int
    score_rows: int
