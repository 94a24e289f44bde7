"""A published dataset -> rows in verl's schema, in Parquet files that are written atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.dataset_files import KEY, Copy
from hwgrpo.data.formats import Broken, Part, Row, each_row
from hwgrpo.data.published import Published
from hwgrpo.data.row_schema import missing_column
from hwgrpo.errors import DataError


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


def convert(dataset: Published, copy: Copy, instruction: str | None, strict: bool) -> dict[str, Converted]:
    """Convert every split of a copy.

    Args:
        dataset: the published dataset.
        copy: its rows.
        instruction: text after every question; None uses the dataset's own, "" none.
        strict: whether a row that cannot be converted is an error.

    Raises:
        DataError: a file lacks a column, no row of a split can be converted, or `strict` and one cannot.
    """
    instruction = dataset.instruction if instruction is None else instruction
    done = {split: _convert(dataset, parts, split, instruction) for split, parts in copy.splits.items()}
    for split, converted in done.items():
        dropped = converted.dropped
        if dropped and strict:
            more = f" (and {len(dropped) - 1} more of {split})" if len(dropped) > 1 else ""
            raise DataError(
                f"{dropped[0].place}: {dropped[0].reason}{more}; fix it, or leave out --strict to drop such rows"
            )
        if not converted.rows:
            raise DataError(f"none of the {converted.read} rows of {split} can be converted; {_first(dropped)}")
    return done


def _convert(dataset: Published, parts: Sequence[tuple[Part, Broken]], split: str, instruction: str) -> Converted:
    rows, dropped, index = [], [], 0
    for part, broken in parts:
        for column in (dataset.question, dataset.solution):
            if column not in part.columns:
                raise _not_the_dataset(dataset, column, part)
        for number, row in each_row(part, broken):
            try:
                if isinstance(row, DataError):
                    raise row
                rows.append(_row(dataset, row, split, index, instruction))
            except DataError as error:
                place = part.place(number)
                dropped.append(Dropped(place, str(error).removeprefix(f"{place}: ")))
            index += 1
    return Converted(index, rows, dropped)


def _row(dataset: Published, row: Row, split: str, index: int, instruction: str) -> Row:
    """Return one row in verl's schema.

    Raises:
        DataError: a column is empty or not text, or the solution has no answer.
    """
    question, solution = (_text(row, column) for column in (dataset.question, dataset.solution))
    return {
        "data_source": dataset.hub,
        "prompt": [{"role": "user", "content": f"{question} {instruction}" if instruction else question}],
        "ability": dataset.ability,
        "reward_model": {"style": "rule", "ground_truth": dataset.answer(solution)},
        "extra_info": {"split": split, "index": index, "answer": solution, "question": question},
    }


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"{column!r} is {'missing' if value is None else 'no text'}")
    if not value.strip():
        raise DataError(f"{column!r} is empty")
    return value


def _not_the_dataset(dataset: Published, column: str, part: Part) -> DataError:
    error = missing_column(f"{dataset.title}'s", column, part.columns, part.name)
    if {"data_source", "prompt", "reward_model"} <= set(part.columns):
        return DataError(f"{error} The file has been converted already: data.train reads it as it is.")
    return error


def _first(dropped: Sequence[Dropped]) -> str:
    return f"the first, {dropped[0].place}: {dropped[0].reason}"


def output_files(folder: Path, copy: Copy, force: bool) -> dict[str, Path]:
    """Return split -> output file.

    Raises:
        DataError: a file exists without `force`, or is one of the input files.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--out {folder} is a file; name a folder")
    files = {split: folder / f"{split}.parquet" for split in copy.splits}
    existing = [file for file in files.values() if file.exists()]
    read = {Path(part.name).resolve() for parts in copy.splits.values() for part, _ in parts}
    for file in existing:
        if file.resolve() in read:
            raise DataError(f"--out {folder}: {KEY} reads {file.name} from there; name another folder")
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

    schema = _schema(pyarrow)
    partial = {file: file.with_name(f".{file.name}.{os.getpid()}.partial") for file in files.values()}
    try:
        for split, file in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial[file].open("wb") as out:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(converted[split].rows), schema), out)
                out.flush()
                os.fsync(out.fileno())
        for file, written in partial.items():
            os.replace(written, file)
    except OSError as error:
        raise DataError(f"--out {next(iter(files.values())).parent}: cannot be written ({error})") from error
    finally:
        for written in partial.values():
            if written.exists():
                written.unlink()


def _schema(pyarrow: Any) -> Any:
    """Return the schema of verl's columns."""
    text = pyarrow.string()
    return pyarrow.schema(
        {
            "data_source": text,
            "prompt": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pyarrow.struct({"style": text, "ground_truth": text}),
            "extra_info": pyarrow.struct({"split": text, "index": pyarrow.int64(), "answer": text, "question": text}),
        }
    )
