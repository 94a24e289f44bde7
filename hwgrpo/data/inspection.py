"""Statistics of data files and all their bad rows, read as by the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwgrpo.data.chat_template import Rendered, render
from hwgrpo.data.formats import READERS, Broken, Part, each_row, read_file
from hwgrpo.data.image_rows import ImagePrompt, read_image_prompt
from hwgrpo.data.images import ImageReader, ReadImage
from hwgrpo.data.prompt_findings import BY_TOKENIZER, findings_of, token_findings
from hwgrpo.data.prompts import TOKENIZE_BATCH
from hwgrpo.data.published import published_with
from hwgrpo.data.reward_check import Judged, check_rows, judge_rows
from hwgrpo.data.row_schema import (
    Message,
    ground_truth_key,
    identity,
    message_text,
    missing_column,
    read_ground_truth,
    read_prompt,
)
from hwgrpo.data.sources import Rows, data_files_in, find_data, split_of
from hwgrpo.errors import ConfigError, DataError, escaped
from hwgrpo.rewards.ground_truths import is_missing
from hwgrpo.rewards.processes.reward_process import Reward
from hwgrpo.values import Prompt

if TYPE_CHECKING:
    from hwgrpo.data.image_prompts import ImagePrompts


@dataclass(frozen=True)
class Settings:
    """Settings for an inspection."""

    data: Any
    """The `data` settings."""
    rewards: Sequence[Reward] | None
    """Rewards to check; None uses the built-in reward of each row's source."""
    tokenizer: Any
    """A transformers tokenizer, or None."""
    score_rows: int
    """Rows per file to check rewards on; 0 is all."""
    change_rows: Callable[[Rows, int], Rows] | None = None
    """As for `build_dataset`: rows with the prompts of environments, and tools."""
    with_images: bool = False
    """Whether rows may have images; False: as a text model reads them, for which they are bad."""
    images: ImagePrompts | None = None
    """Counts the tokens of prompts with images; None: they are not counted."""


@dataclass
class _Good:
    """The valid rows, by index."""

    prompts: dict[int, str | tuple[Message, ...]] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    keys: dict[int, str | None] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    images: dict[int, list[ReadImage]] = field(default_factory=dict)
    """Of rows with images, without their pixels."""
    findings: Counter[str] = field(default_factory=Counter)


def inspect_files(names: Sequence[str], settings: Settings) -> Inspection:
    """Read files and return their statistics and bad rows.

    Args:
        names: files, or folders of files.
        settings: settings of the inspection.

    Raises:
        ConfigError: settings contradict the data.
        DataError: a file is missing, cannot be read, or has no prompt column.
    """
    reports, seen = [], []
    for path in dict.fromkeys(path for name in names for path in _files(name)):
        report, first = _inspect(path, settings)
        reports.append(report)
        seen.append(first)
    overlaps = []
    for (one, here), (other, there) in combinations(zip(reports, seen, strict=True), 2):
        both = [prompt for prompt in here if prompt in there]
        if both:
            places = here[both[0]], there[both[0]]
            overlaps.append(Overlap((one.name, other.name), len(both), places))
    return Inspection(reports, overlaps, settings.data.max_prompt_tokens, settings.score_rows)


def _files(name: str) -> list[Path]:
    path = find_data(name, "FILE")
    if path is None:
        raise DataError(f"{name}: no such file or folder (looked for {escaped(str(Path(name).absolute()), 1000)})")
    if path.is_file():
        return [path]
    files = [path / file for file in data_files_in(path, "FILE")]
    files.sort(key=lambda file: split_of(Path(file.name)) != "train")
    if not files:
        raise DataError(f"{name}: the folder has no data files ({', '.join(READERS)})")
    return files


def _inspect(path: Path, settings: Settings) -> tuple[FileReport, dict[str, str]]:
    """Return a file's report, and the first place of each prompt."""
    config = settings.data
    broken: Broken = {}
    part = read_file(path, broken if settings.change_rows is None else None)
    rows = Rows([part])
    if settings.change_rows is not None:
        rows = settings.change_rows(rows, len(rows))
        part = replace(part, rows=rows, columns=rows.columns)
    if part.columns and config.prompt_key not in part.columns:
        raise _no_prompts(config.prompt_key, part)
    good, bad = _read_rows(rows, part, broken, settings)
    tokens, of_images = None, []
    if settings.tokenizer is not None:
        tokens, of_images = _token_lengths(rows, part, good, bad, settings)
    for index in bad:
        good.prompts.pop(index, None)
    sampled = _spread([index for index in good.prompts if good.keys[index] is not None], settings.score_rows)
    judged, unscored = judge_rows([_prompt(part, good, index) for index in sampled], settings.rewards)
    bad |= {sampled[number]: reason for number, reason in unscored.items()}
    every = list(good.prompts)
    checked, refused = check_rows([_prompt(part, good, index) for index in every], settings.rewards)
    judged += checked
    bad |= {every[number]: reason for number, reason in refused.items()}
    first, repeats = _repeats(part, good)
    limit = config.max_prompt_tokens
    report = FileReport(
        name=str(path),
        rows=len(part.rows),
        columns=part.columns,
        prompts=_counts(_kind(prompt) for prompt in good.prompts.values()),
        ground_truths=_counts(key for key in good.keys.values() if key is not None),
        unanswered=sum(key is None for key in good.keys.values()),
        sources=_counts(good.sources.values()),
        characters=_lengths([len(_text(prompt)) for prompt in good.prompts.values()]),
        tokens=None if tokens is None else _lengths(tokens),
        image_tokens=_lengths(of_images),
        overlong=None if tokens is None else sum(count > limit for count in tokens),
        repeats=repeats,
        bad=[BadRow(index, part.place(index), bad[index]) for index in sorted(bad)],
        judged=judged,
        findings=dict(good.findings),
        images=_image_counts(good),
    )
    return report, first


def _no_prompts(key: str, part: Part) -> DataError:
    error = missing_column("data.prompt_key", key, part.columns, part.name)
    dataset = published_with(part.columns)
    hint = "set it in a recipe and give --recipe RECIPE"
    if dataset is not None:
        hint = f"this looks like {dataset} as it is published: hwgrpo data {dataset} --source {part.name}"
    return DataError(f"{error} ({hint})")


def _read_rows(rows: Rows, part: Part, broken: Broken, settings: Settings) -> tuple[_Good, dict[int, str]]:
    """Return the valid rows, and the errors of the others."""
    good, bad, config = _Good(), {}, settings.data
    reader = ImageReader(config.images)
    marks = frozenset() if settings.images is None else settings.images.marks
    for index, row in each_row(part, broken):
        place = part.place(index)
        try:
            if isinstance(row, DataError):
                raise row
            prompt, shown = (
                read_image_prompt(row, config, marks, place)
                if settings.with_images
                else ImagePrompt(read_prompt(row, config.prompt_key, place))
            )
            read = reader.read_all(shown, rows.folder(index), place)
            answer = read_ground_truth(row, config.ground_truth_key, place)
        except DataError as error:
            bad[index] = str(error).removeprefix(f"{place}: ")
            continue
        source = row.get(config.source_key)
        good.prompts[index] = prompt
        if read:
            good.images[index] = [replace(each, image=None) for each in read]
        good.findings.update(findings_of(prompt))
        good.answers[index] = answer
        good.keys[index] = None if is_missing(answer) else config.ground_truth_key or ground_truth_key(row)
        good.sources[index] = part.source if source is None else str(source)
        if isinstance(answer, str) and not answer.strip():
            bad[index] = f"the ground truth ({good.keys[index]}) is empty"
    if any(key is not None for key in good.keys.values()):  # otherwise the file has no ground truths by design
        bad |= {index: "no ground truth, which other rows have" for index, key in good.keys.items() if key is None}
    return good, bad


def _token_lengths(
    rows: Rows, part: Part, good: _Good, bad: dict[int, str], settings: Settings
) -> tuple[list[int], list[int]]:
    """Return token lengths after the chat template, and how many of them are of images, where there are some.

    Errors of rows are added to `bad`.
    """
    counts, of_images = [], []
    indices = [
        index
        for index in good.prompts
        if index not in bad and (settings.images is not None or index not in good.images)
    ]
    reader = ImageReader(settings.data.images)
    for start in range(0, len(indices), TOKENIZE_BATCH):
        rendered = {}
        for index in indices[start : start + TOKENIZE_BATCH]:
            try:
                row = render(rows, index, settings.data, settings.tokenizer, settings.images)
                rendered[index] = row, _token_ids(rows, index, row, reader, settings)
            except DataError as error:
                bad[index] = str(error).removeprefix(f"{part.place(index)}: ")
            except ConfigError as error:
                raise ConfigError(f"{error}; --recipe RECIPE reads such settings from a recipe") from error
        for index, (row, ids) in rendered.items():
            if ids:
                counts.append(len(ids))
                if settings.images is not None and row.sources:
                    of_images.append(sum(token == settings.images.token_id for token in ids))
                good.findings.update(BY_TOKENIZER & {*row.findings, *token_findings(ids, settings.tokenizer)})
            else:
                bad[index] = "the prompt has no tokens under this tokenizer"
    return counts, of_images


def _token_ids(rows: Rows, index: int, row: Rendered, reader: ImageReader, settings: Settings) -> Sequence[int]:
    if settings.images is None or not row.sources:
        return settings.tokenizer(row.text, add_special_tokens=not row.templated)["input_ids"]
    read = reader.read_all(row.sources, rows.folder(index), rows.place(index))
    return settings.images.encode(row.text, [each.image for each in read], rows.place(index), thumbnails=False)[0]


def _image_counts(good: _Good) -> ImageCounts | None:
    read = [good.images[index] for index in good.prompts if index in good.images]
    if not read:
        return None
    widths, heights = zip(*(each.size for images in read for each in images), strict=True)
    return ImageCounts(_counts(len(images) for images in read), _statistics(widths), _statistics(heights))


def _prompt(part: Part, good: _Good, index: int) -> Prompt:
    prompt = good.prompts[index]
    return Prompt(
        uid=str(index),
        text=_text(prompt),
        token_ids=(),
        ground_truth=good.answers[index],
        columns=part.rows[index],
        source=good.sources[index],
        place=part.place(index),
        messages=None if isinstance(prompt, str) else prompt,
    )


def _repeats(part: Part, good: _Good) -> tuple[dict[str, str], list[Repeat]]:
    first: dict[str, str] = {}
    repeats = []
    for index, prompt in good.prompts.items():
        digests = [each.digest for each in good.images.get(index, ())]
        place, key = part.place(index), identity(prompt, digests)
        if key in first:
            repeats.append(Repeat(place, first[key]))
        else:
            first[key] = place
    return first, repeats


def _text(prompt: str | tuple[Message, ...]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))


def _kind(prompt: str | tuple[Message, ...]) -> str:
    if isinstance(prompt, str):
        return "text"
    return f"messages: {escaped(', '.join(message['role'] for message in prompt), 100)}"


def _counts(values: Iterable[Any]) -> dict[Any, int]:
    """Return value -> count, the most common first."""
    return dict(Counter(values).most_common())


def _lengths(values: Sequence[int]) -> Lengths | None:
    return _statistics(values) if values else None


def _statistics(values: Sequence[int]) -> Lengths:
    # the higher of two neighbors, so that every statistic is the length of some prompt
    middle, high = np.percentile(values, (50, 95), method="higher").tolist()
    return Lengths(min(values), int(middle), int(high), max(values))


def _spread(indices: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the indices, evenly spread; 0 returns all."""
    if not most or len(indices) <= most:
        return list(indices)
    return [indices[number * len(indices) // most] for number in range(most)]


@dataclass(frozen=True)
class BadRow:
    """A row that the trainer would reject, or on which no response could get a reward."""

    index: int
    """From 0."""
    place: str
    reason: str


@dataclass(frozen=True)
class Lengths:
    """Statistics of the lengths of a file's prompts, or of the sides of its images."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class ImageCounts:
    """Images of the prompts of a file."""

    per_row: Mapping[int, int]
    """Number of images -> rows that have so many."""
    widths: Lengths
    """In pixels, before images are scaled."""
    heights: Lengths


@dataclass(frozen=True)
class Repeat:
    """A prompt equal to that of an earlier row, up to white space, with the same images."""

    place: str
    earlier: str


@dataclass(frozen=True)
class FileReport:
    """Statistics and bad rows of one file."""

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
    image_tokens: Lengths | None
    """Those of the images of a prompt, where there are some."""
    overlong: int | None
    """Prompts longer than `data.max_prompt_tokens`; None where tokens are not counted."""
    repeats: Sequence[Repeat]
    bad: Sequence[BadRow]
    judged: Sequence[Judged]
    findings: Mapping[str, int]
    """Kind of `prompt_findings` -> rows."""
    images: ImageCounts | None
    """None: no prompt has images."""


@dataclass(frozen=True)
class Overlap:
    """Prompts that two files share."""

    files: tuple[str, str]
    prompts: int
    places: tuple[str, str]
    """Place of the first shared prompt in each file."""


@dataclass(frozen=True)
class Inspection:
    """Reports of several files, and their overlaps."""

    files: Sequence[FileReport]
    overlaps: Sequence[Overlap]
    max_prompt_tokens: int
    score_rows: int
