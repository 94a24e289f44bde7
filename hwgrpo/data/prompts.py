"""Rows -> tokenized prompts, with the chat template, the length limit and the fields for rewards."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hwgrpo.catalog import OVERLONG_POLICIES
from hwgrpo.data.chat_template import Rendered, conversation_with_images, render
from hwgrpo.data.images import ImageReader, digest_of
from hwgrpo.data.prompt_findings import finding_notes, token_findings
from hwgrpo.data.row_schema import (
    GROUND_TRUTH_KEYS,
    missing_column,
    read_ground_truth,
)
from hwgrpo.data.sources import Rows, open_all, sources_of, validation_source
from hwgrpo.data.tasks import PREFIX
from hwgrpo.errors import ConfigError, DataError, choice_error, escaped, quoted
from hwgrpo.support.waits import Wait
from hwgrpo.values import Prompt, PromptImages

if TYPE_CHECKING:
    from hwgrpo.data.image_prompts import ImagePrompts

TOKENIZE_BATCH = 1000


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """Tokenized prompts, indexed from 0 without the filtered ones."""

    name: str
    """Value of `data.train` or `data.validation`."""
    rows: Rows
    """All rows of the sources."""
    kept: Sequence[int]
    """[len(self)] index of each prompt's row."""
    texts: Sequence[str]
    """[len(self)] prompts after the chat template."""
    token_ids: Sequence[np.ndarray]
    """[len(self)] int32 arrays."""
    filtered: int
    """Number of rows dropped as longer than `data.max_prompt_tokens`."""
    truncated: int
    """Number of rows truncated to `data.max_prompt_tokens`."""
    config: Any
    """The `data` settings it was built with."""
    unanswered: int | None = None
    """Index of the first kept row without a ground truth; None when all have one."""
    without_answer: int = 0
    """Number of kept rows without a ground truth."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """`{rows, sha256, text_sha256}`: number of rows, a hash of all their columns, and one of what the model reads."""
    unused_template: int = 0
    """Rows with plain text to which the tokenizer's chat template was not applied, under `data.chat=auto`."""
    templated: int = 0
    """Prompts to which the chat template was applied."""
    available: int = 0
    """Number of rows of the sources that could be read, of which `data.max_rows` or `validation_max_rows` took some."""
    findings: Mapping[str, int] = field(default_factory=dict)
    """Kind of `prompt_findings` -> rows."""
    images: ImagePrompts | None = None
    """Encodes prompts with images; None: a text model."""
    reader: ImageReader | None = None
    """Reads the images of rows; None: a text model."""
    image_digests: Mapping[int, str] = field(default_factory=dict)
    """Index of a row with images -> a hash of them."""
    image_tokens: tuple[int, ...] = ()
    """Tokens of each image of the prompt whose images have the most; () where no prompt has images."""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the data columns."""
        return self.rows.columns

    @property
    def marks(self) -> frozenset[str]:
        """Texts of the tokens that show images; none with a text model."""
        return frozenset() if self.images is None else self.images.marks

    @property
    def prompts_with_images(self) -> int:
        """Number of prompts that have images."""
        return sum(index in self.image_digests for index in self.kept)

    @property
    def longest(self) -> int:
        """Length of the longest prompt, in tokens."""
        return max(len(ids) for ids in self.token_ids)

    @property
    def row_counts(self) -> dict[str, float]:
        """The metrics of a validation that say how many rows were read of how many; empty where all were."""
        read = self.fingerprint.get("rows", 0)
        return {"val-aux/rows": read, "val-aux/rows_available": self.available} if read < self.available else {}

    def require_ground_truth(self, needed_by: str) -> None:
        """Check that every prompt has an answer.

        Args:
            needed_by: consumer of the answers, for the message ("reward exact_match").

        Raises:
            DataError: a prompt has none; the message names its row and the columns that were tried.
        """
        if self.unanswered is None:
            return
        key = self.config.ground_truth_key
        tried = (
            f"{key!r} (data.ground_truth_key) is null, NaN or an empty list"
            if key
            else f"tried {', '.join(GROUND_TRUTH_KEYS)}"
        )
        names = (name for name in self.rows[self.unanswered] if name != self.config.prompt_key)
        has = escaped(", ".join(names), 300) or "nothing else"
        raise DataError(
            f"{self.rows.place(self.unanswered)}: no ground truth, which {needed_by} needs; {tried}; besides the "
            f"prompt the row has: {has}. Name the answer's column with data.ground_truth_key"
        )

    def prompt(self, row: int, epoch: int) -> Prompt:
        """Return one prompt; the same row has another uid in another epoch.

        Args:
            row: 0 <= row < len(self).
            epoch: the pass over the data, from 0.
        """
        index = self.kept[row]
        columns = self.rows[index]
        source = columns.get(self.config.source_key)
        place = self.rows.place(index)
        messages, sources = conversation_with_images(columns, self.config, place, self.images)
        return Prompt(
            uid=f"{epoch}:{row}",
            text=self.texts[row],
            token_ids=tuple(self.token_ids[row].tolist()),
            ground_truth=read_ground_truth(columns, self.config.ground_truth_key, place),
            columns=columns,
            source=self.rows.source(index) if source is None else str(source),
            place=place,
            messages=None if isinstance(messages, str) else messages,
            tools=tuple(self.rows.tools(index)),
            images=self._images(row, sources) if sources else None,
        )

    def _images(self, row: int, sources: Sequence[Any]) -> PromptImages:
        """Return the images of a prompt, which are read again.

        Raises:
            DataError: they are not those that were read when the dataset was built.
        """
        assert self.images is not None
        assert self.reader is not None
        index = self.kept[row]
        place = self.rows.place(index)
        read = self.reader.read_all(sources, self.rows.folder(index), place)
        if digest_of(read) != self.image_digests[index]:
            raise DataError(f"{place}: its images changed since the run started; restore them, or start the run again")
        return self.images.encode(self.texts[row], [each.image for each in read], place)[1]


def template_note(name: str, dataset: PromptDataset | None) -> str | None:
    """Return a note where prompts are plain text and the tokenizer has a chat template, else None.

    Args:
        name: "training" or "validation".
        dataset: its prompts.
    """
    if dataset is None or not dataset.unused_template:
        return None
    return (
        f"{dataset.unused_template:,} {name} prompts are plain text, to which the tokenizer's chat template is not "
        "applied; data.chat=always applies it, data.chat=never leaves this note out"
    )


def overlong_note(name: str, dataset: PromptDataset, limit: int) -> str | None:
    """Return a note on the prompts that are longer than `data.max_prompt_tokens`, if there are any."""
    if not dataset.filtered and not dataset.truncated:
        return None
    return (
        f"{name} prompts longer than data.max_prompt_tokens={limit}: {dataset.filtered} dropped, {dataset.truncated} "
        f"cut, {len(dataset)} kept"
    )


def answer_note(name: str, dataset: PromptDataset) -> str | None:
    """Return a note on the prompts without a ground truth, if there are any; rewards may need none."""
    if not dataset.without_answer:
        return None
    key = dataset.config.ground_truth_key
    looked = f"data.ground_truth_key={key}" if key else f"columns {', '.join(GROUND_TRUTH_KEYS)}"
    return (
        f"{dataset.without_answer:,} of {len(dataset):,} {name} prompts have no ground truth ({looked}): rewards that "
        "compare with it cannot score them"
    )


def repeats_note(dataset: PromptDataset, prompts_per_step: int) -> str | None:
    """Return a note where a step has more prompts than the training data."""
    if prompts_per_step <= len(dataset):
        return None
    return (
        f"trainer.prompts_per_step={prompts_per_step:,} is more than the {len(dataset):,} training prompts: a step "
        f"repeats prompts, each as a group of its own; set it to {len(dataset):,} or less"
    )


def dataset_notes(name: str, dataset: PromptDataset | None) -> Iterator[str]:
    """Yield what a user should know of prompts: how many are read of how many, and what is odd about them.

    Args:
        name: "training" or "validation".
        dataset: the prompts.
    """
    if dataset is None:
        return
    if dataset.row_counts:
        read = dataset.fingerprint["rows"]
        setting = "data.max_rows" if name == "training" else "data.validation_max_rows"
        yield f"{name}: {read:,} of {dataset.available:,} rows are read ({setting}={read}; 0 reads all)"
    yield from filter(None, (template_note(name, dataset), answer_note(name, dataset)))
    yield from finding_notes(name, dataset.findings)


def build_dataset(
    config: Any,
    tokenizer: Any,
    which: str,
    change_rows: Callable[[Rows, int], Rows] | None = None,
    images: ImagePrompts | None = None,
) -> PromptDataset | None:
    """Read, render and tokenize the training or validation prompts.

    Args:
        config: the `data` settings (`DataConfig`).
        tokenizer: a transformers tokenizer.
        which: "train" or "validation".
        change_rows: (rows, number of rows that are read) -> rows with other prompts, or with tools; None: no change.
        images: encodes prompts with images (`load_image_prompts`), which are all read here to find bad ones and to
            count tokens; None: a text model, and a row with images is an error.

    Returns:
        The dataset; None for "validation" when there is none (no setting, and the training data is not a task).

    Raises:
        ConfigError: settings contradict the data, e.g. a conversation and a tokenizer without a chat template.
        DataError: data is missing or malformed; the message names file and row.
    """
    assert which in ("train", "validation"), which
    if config.overlong not in OVERLONG_POLICIES:
        raise choice_error("data.overlong", config.overlong, OVERLONG_POLICIES)
    spec, split, max_rows = config.train, config.split, config.max_rows
    if which == "validation":
        spec = validation_source(config)
        if spec is None:
            return None
        split, max_rows = config.validation_split, config.validation_max_rows
    rows, name = open_all(spec, split, which), ", ".join(sources_of(spec))
    count = min(len(rows), max_rows) if max_rows else len(rows)
    if change_rows is not None:
        rows = change_rows(rows, count)
    if config.prompt_key not in rows.columns:
        raise missing_column("data.prompt_key", config.prompt_key, rows.columns, name)
    reader = None if images is None else ImageReader(config.images)
    if config.images.key is not None:
        check_image_key(config.images.key, rows.columns, name, images is not None)

    kept, texts, token_ids, filtered, truncated = [], [], [], 0, 0
    unanswered: int | None = None
    without_answer = 0
    unused_template = templated = 0
    findings: Counter[str] = Counter()
    by_user = not name.startswith(PREFIX)  # prompts of a built-in task are plain text by design
    digest, text_digest = hashlib.sha256(), hashlib.sha256()
    image_digests: dict[int, str] = {}
    wait = Wait(
        lambda: f"the images of data.{which} ({len(kept) + filtered:,} of {count:,} rows are read)", math.inf
    )  # many images take minutes
    image_tokens: tuple[int, ...] = ()
    for index, row, ids in _tokenize(rows, count, config, tokenizer, images):
        text, encoded = row.text, None
        digest.update(row_bytes(row.columns, rows.place(index)))
        text_digest.update(text.encode() + b"\0")
        if row.sources:
            assert images is not None
            assert reader is not None
            wait.report()
            read = reader.read_all(row.sources, rows.folder(index), rows.place(index))
            ids, encoded = images.encode(text, [each.image for each in read], rows.place(index), thumbnails=False)
            image_digests[index] = digest_of(read)
            digest.update(image_digests[index].encode())
            text_digest.update(image_digests[index].encode())
        findings.update((*row.findings, *token_findings(ids, tokenizer)))
        templated += row.templated
        if by_user and not row.templated and config.chat == "auto" and tokenizer.chat_template is not None:
            unused_template += 1
        if len(ids) > config.max_prompt_tokens:
            if config.overlong == "filter":
                filtered += 1
                continue
            if config.overlong == "error":
                raise DataError(
                    f"{rows.place(index)}: the prompt has {len(ids)} tokens, data.max_prompt_tokens="
                    f"{config.max_prompt_tokens}; raise the limit, or set data.overlong to filter or truncate_left"
                )
            if row.sources:
                raise DataError(
                    f"{rows.place(index)}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens="
                    f"{config.max_prompt_tokens}, and data.overlong={config.overlong} cannot cut images; set "
                    "data.overlong=filter, raise the limit, or lower data.images.max_pixels"
                )
            limit = config.max_prompt_tokens
            ids = ids[-limit:] if config.overlong == "truncate_left" else ids[:limit]
            text = tokenizer.decode(ids)
            truncated += 1
        if not row.answered and unanswered is None:
            unanswered = index
        without_answer += not row.answered
        image_tokens = max(image_tokens, encoded.tokens if encoded else (), key=sum)
        kept.append(index)
        texts.append(text)
        token_ids.append(np.asarray(ids, dtype=np.int32))
    if not kept:
        raise DataError(
            f"data.{which}={name!r}: all {filtered} prompts are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens} and were filtered; raise the limit, or set data.overlong=truncate_left"
        )
    fingerprint = {"rows": count, "sha256": digest.hexdigest(), "text_sha256": text_digest.hexdigest()}
    return PromptDataset(
        name=name,
        rows=rows,
        kept=kept,
        texts=texts,
        token_ids=token_ids,
        filtered=filtered,
        truncated=truncated,
        config=config,
        unanswered=unanswered,
        without_answer=without_answer,
        fingerprint=fingerprint,
        unused_template=unused_template,
        templated=templated,
        available=len(rows),
        findings=findings,
        images=images,
        reader=reader,
        image_digests=image_digests,
        image_tokens=image_tokens,
    )


def check_image_key(key: str, columns: Sequence[str], name: str, reads_images: bool) -> None:
    """Check that `data.images.key` is a column that the model reads.

    Args:
        key: its value.
        columns: names of the data's columns.
        name: of the data, for messages.
        reads_images: whether the model does.

    Raises:
        ConfigError: a text model would be trained without the images.
        DataError: there is no such column.
    """
    if not reads_images:
        raise ConfigError(
            f"data.images.key={key} names a column of images, and the model reads text alone; use a model that reads "
            "images, or remove the setting"
        )
    if key not in columns:
        raise missing_column("data.images.key", key, columns, name)


def _tokenize(
    rows: Rows, count: int, config: Any, tokenizer: Any, images: ImagePrompts | None
) -> Iterator[tuple[int, Rendered, list[int]]]:
    """Yield (index, rendered row, token ids of its text), tokenizing in batches."""
    for start in range(0, count, TOKENIZE_BATCH):
        indices = range(start, min(start + TOKENIZE_BATCH, count))
        rendered = [render(rows, index, config, tokenizer, images) for index in indices]
        ids: list[list[int]] = [[] for _ in rendered]
        # A chat template writes its own special tokens; plain text gets the tokenizer's.
        for templated in (True, False):
            chosen = [number for number, row in enumerate(rendered) if row.templated == templated]
            if chosen:
                texts = [rendered[number].text for number in chosen]
                encoded = tokenizer(texts, add_special_tokens=not templated, return_attention_mask=False)["input_ids"]
                for number, tokens in zip(chosen, encoded, strict=True):
                    ids[number] = tokens
        for index, row, tokens in zip(indices, rendered, ids, strict=True):
            if not tokens:
                raise DataError(
                    f"{rows.place(index)}: the prompt {quoted(row.text)} has no tokens under this tokenizer"
                )
            yield index, row, tokens


def row_bytes(columns: Mapping[str, Any], place: str) -> bytes:
    """Return a row's bytes for the fingerprint of its dataset.

    Raises:
        DataError: the row is nested too deeply.
    """
    try:
        return json.dumps(dict(columns), sort_keys=True, default=_content).encode() + b"\n"
    except RecursionError as error:
        raise DataError(f"{place}: the row is nested too deeply to be read") from error


def _content(value: Any) -> Any:
    """Convert a value that JSON lacks to one that is the same in every process."""
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if type(value).__module__ in ("datetime", "decimal", "uuid") else type(value).__name__
