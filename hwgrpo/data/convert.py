"""A published dataset -> rows in verl's schema, in Parquet files that are written atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.dataset_files import Copy
from hwgrpo.data.duplicates import DuplicateFilter, Places, identity_of
from hwgrpo.data.formats import Broken, Part, Row, each_row
from hwgrpo.data.published import Conversion
from hwgrpo.data.raw_rows import Example
from hwgrpo.data.row_schema import Message, check_text, missing_column
from hwgrpo.errors import DataError
from hwgrpo.support.file_systems import sync


@dataclass(frozen=True)
class Dropped:
    """A row that could not be converted."""

    place: str
    reason: str


@dataclass(frozen=True)
class Converted:
    """A split in verl's schema."""

    read: int
    """Number of rows in its files."""
    rows: Sequence[Row]
    dropped: Sequence[Dropped]
    repeated: Mapping[str, Places]
    """Reason -> rows left out as duplicates."""


def convert(
    dataset: Conversion, copy: Copy, instruction: str | None, strict: bool, keep_duplicates: bool = False
) -> dict[str, Converted]:
    """Convert every split of a copy.

    Args:
        dataset: how rows are converted.
        copy: its rows.
        instruction: text after every question; None uses the dataset's own, "" none.
        strict: whether a row that cannot be converted is an error.
        keep_duplicates: keep rows with the prompt of an earlier row, and training rows with one of another split.

    Raises:
        DataError: a file lacks a column, no row of a split can be converted, or `strict` and one cannot.
    """
    done: dict[str, Converted] = {}
    held_out: dict[str, str] = {}
    kinds: set[type] = set()
    for split in sorted(
        copy.splits, key=lambda name: name == "train"
    ):  # training rows last: others' prompts are left out
        unique = None if keep_duplicates else DuplicateFilter(held_out if split == "train" else {})
        one = _convert(dataset, copy.splits[split], _Writer(dataset, split, instruction, kinds), unique)
        if one.dropped and strict:
            dropped = one.dropped
            more = f" (and {len(dropped) - 1} more of {split})" if len(dropped) > 1 else ""
            raise DataError(
                f"{dropped[0].place}: {dropped[0].reason}{more}; fix it, or leave out --strict to drop such rows"
            )
        if not one.rows:
            raise DataError(_nothing_left(one, split))
        held_out |= {identity_of(row): split for row in one.rows}
        done[split] = one
    return {split: done[split] for split in copy.splits}


def _convert(
    dataset: Conversion, parts: Sequence[tuple[Part, Broken]], writer: _Writer, unique: DuplicateFilter | None
) -> Converted:
    rows, dropped, index = [], [], 0
    for part, broken in parts:
        missing = dataset.missing(part.columns)
        if missing is not None:
            raise _not_the_dataset(dataset, missing, part)
        for number, raw in each_row(part, broken):
            try:
                if isinstance(raw, DataError):
                    raise raw
                row = writer.row(dataset.example(raw), index)
                if unique is None or unique.is_new(row, part.place(number)):
                    rows.append(row)
            except DataError as error:
                place = part.place(number)
                dropped.append(Dropped(place, str(error).removeprefix(f"{place}: ")))
            index += 1
    return Converted(index, rows, dropped, {} if unique is None else unique.repeated)


@dataclass(frozen=True)
class _Writer:
    """Makes the rows of a split from examples."""

    dataset: Conversion
    split: str
    instruction: str | None
    kinds: set[type]
    """The type of the ground truths of all splits, once one is known: a column has one type."""

    def row(self, example: Example, index: int) -> Row:
        """Return a row in verl's schema.

        Raises:
            DataError: the ground truth is of another type than those of earlier rows, or a text is not Unicode.
        """
        truth = example.ground_truth
        if truth is not None and self.kinds and type(truth) not in self.kinds:
            raise DataError(f"the ground truth is {'a list' if isinstance(truth, list) else 'no list'}, unlike others")
        prompt = self._messages(example.prompt)
        for message in prompt:
            check_text(message["content"], "the prompt")
        if truth is not None:
            self.kinds.add(type(truth))
        return {
            "data_source": self.dataset.data_source,
            "prompt": prompt,
            "ability": self.dataset.ability,
            "reward_model": {"style": "model" if truth is None else "rule", "ground_truth": truth},
            "extra_info": {"split": self.split, "index": index, **example.info},
            **example.columns,
        }

    def _messages(self, prompt: str | Sequence[Message]) -> list[Message]:
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        instruction = self.dataset.instruction if self.instruction is None else self.instruction
        if instruction:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}{self.dataset.separator}{instruction}"}
        return messages


def _not_the_dataset(dataset: Conversion, column: str, part: Part) -> DataError:
    error = missing_column(f"{dataset.title}'s", column, part.columns, part.name)
    if {"data_source", "prompt", "reward_model"} <= set(part.columns):
        return DataError(f"{error} The file has been converted already: data.train reads it as it is.")
    return error


def _nothing_left(converted: Converted, split: str) -> str:
    if converted.dropped:
        return f"none of the {converted.read} rows of {split} can be converted; {_first(converted.dropped)}"
    return (
        f"all {converted.read} rows of {split} have a prompt of another split; convert other files, or give "
        "--keep-duplicates"
    )


def _first(dropped: Sequence[Dropped]) -> str:
    return f"the first, {dropped[0].place}: {dropped[0].reason}"


def output_files(folder: Path, copy: Copy, force: bool, further: Sequence[str] = ()) -> dict[str, Path]:
    """Return split -> output file.

    Args:
        folder: the folder.
        copy: what is read.
        force: whether existing files may be written over.
        further: splits that are made besides those of the copy.

    Raises:
        DataError: a file exists without `force`, or is one of the input files.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--out {folder} is a file; name a folder")
    files = {split: folder / f"{split}.parquet" for split in (*copy.splits, *further)}
    existing = [file for file in files.values() if file.exists()]
    read = {Path(part.name).resolve() for parts in copy.splits.values() for part, _ in parts}
    for file in existing:
        if file.resolve() in read:
            raise DataError(f"--out {folder}: {file.name} there is one of the files to read; name another folder")
    if existing and not force:
        raise DataError(
            f"{' and '.join(map(str, existing))} {'exists' if len(existing) == 1 else 'exist'}; "
            "--force writes over, --out FOLDER writes elsewhere"
        )
    return files


def write(files: Mapping[str, Path], converted: Mapping[str, Converted]) -> None:
    """Write every split to its file, by temporary files, so that a failure changes nothing.

    Raises:
        DataError: the folder cannot be written to.
    """
    import pyarrow
    import pyarrow.parquet

    schema = _schema(pyarrow, [row for each in converted.values() for row in each.rows])
    partial = {file: file.with_name(f".{file.name}.{os.getpid()}.partial") for file in files.values()}
    try:
        for split, file in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial[file].open("wb") as out:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(converted[split].rows), schema), out)
                out.flush()
                sync(out)
        for file, written in partial.items():
            os.replace(written, file)
    except OSError as error:
        raise DataError(f"--out {next(iter(files.values())).parent}: cannot be written ({error})") from error
    finally:
        for written in partial.values():
            if written.exists():
                written.unlink()


def _schema(pyarrow: Any, rows: Sequence[Row]) -> Any:
    """Return the schema of rows, which all have the same columns."""
    text = pyarrow.string()
    messages = pyarrow.list_(pyarrow.struct({"role": text, "content": text}))
    listed = any(isinstance(row["reward_model"]["ground_truth"], list) for row in rows)
    info = {name: pyarrow.int64() if name == "index" else text for name in rows[0]["extra_info"]}
    columns = {
        "data_source": text,
        "prompt": messages,
        "ability": text,
        "reward_model": pyarrow.struct({"style": text, "ground_truth": pyarrow.list_(text) if listed else text}),
        "extra_info": pyarrow.struct(info),
    }
    images = pyarrow.list_(pyarrow.struct({"bytes": pyarrow.binary(), "path": text}))
    others = {name: images if name == "images" else messages for name in rows[0] if name not in columns}
    return pyarrow.schema(columns | others)
