"""Sources of a published dataset's rows: local files, a folder of `save_to_disk`, or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.formats import READERS, TABLES, Broken, Part, read_file
from hwgrpo.data.media import without_decoding
from hwgrpo.data.published import Published
from hwgrpo.data.sources import SPLIT_WORDS, data_files_in, find_data, load_saved, split_of
from hwgrpo.errors import DataError

KEY = "--source"


@dataclass(frozen=True)
class Copy:
    """The rows of a published dataset at their source."""

    source: str
    """The source, for messages."""
    splits: Mapping[str, Sequence[tuple[Part, Broken]]]
    """Split -> its files, with the errors of broken rows."""
    skipped: Mapping[str, Sequence[str]]
    """Reason why files were skipped -> their names."""


def open_copy(dataset: Published, spec: str | None) -> Copy:
    """Find and read a published dataset.

    Args:
        dataset: which one.
        spec: a file, a folder or a hub name; None is the dataset's own hub name.

    Raises:
        DataError: nothing found, a file cannot be read, or there are no rows of the dataset's splits.
    """
    spec = spec or dataset.hub
    path = find_data(spec, KEY)
    if path is None:
        return _from_hub(dataset, spec)
    if path.is_file():
        split = split_of(Path(path.name)) or dataset.splits[0]
        if split not in dataset.splits:
            raise DataError(
                f"{KEY} {path}: its name implies the split {split!r}, and {dataset.title} has answers for "
                f"{' and '.join(dataset.splits)} alone; name one of these, or rename the file"
            )
        return Copy(str(path), {split: [_read(path, dataset)]}, {})
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, dataset)
    return _from_folder(dataset, path)


def _from_folder(dataset: Published, folder: Path) -> Copy:
    files = data_files_in(folder, KEY, "**/*")
    files = [file for file in files if file.suffix.lower() not in TABLES] or files
    if not files:
        raise DataError(
            f"{KEY} {folder}: the folder has no data files ({', '.join(READERS)}); {dataset.title} is "
            f"{' and '.join(dataset.files)} of {dataset.page}"
        )
    skipped: dict[str, list[str]] = {}

    def keep(wanted: list[Path], reason: str) -> list[Path]:
        """Skip all files but the wanted ones, unless none is wanted."""
        if wanted and len(wanted) < len(files):
            skipped[reason] = [str(file) for file in files if file not in set(wanted)]
            return wanted
        return files

    files = keep([file for file in files if set(dataset.folders) & set(file.parts[:-1])], "of another subset")
    files = keep([file for file in files if not _name_parts(file) & set(dataset.other_versions)], "another version")
    files = keep([file for file in files if split_of(file)], "names no split")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file) or dataset.splits[0], []).append(file)
    if not set(by_split) & set(dataset.splits):
        raise DataError(
            f"{KEY} {folder}: its files are of the split {', '.join(sorted(by_split))}; "
            f"{' or '.join(dataset.splits)} is needed"
        )
    for split in sorted(set(by_split) - set(dataset.splits)):
        skipped[f"of the split {split}"] = [str(file) for file in by_split[split]]
    splits = {
        split: [_read(folder / file, dataset) for file in by_split[split]]
        for split in dataset.splits
        if split in by_split
    }
    return Copy(str(folder), splits, skipped)


def _name_parts(file: Path) -> set[str]:
    return {word for part in file.parts for word in re.split(r"[^a-z0-9]+", part.lower())}


def _read(path: Path, dataset: Published) -> tuple[Part, Broken]:
    if path.suffix.lower() == ".json" and (row := _single_row(path, dataset)) is not None:
        return Part(str(path), [row], tuple(row), path.name), {}
    broken: Broken = {}
    return read_file(path, broken), broken


def _single_row(path: Path, dataset: Published) -> dict[str, Any] | None:
    """Return the row of a file with a single row, as in MATH's first release, or None."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # `read_file` reports the error
        return None
    return content if isinstance(content, dict) and dataset.missing(content) is None else None


def _saved(folder: Path, dataset: Published) -> Copy:
    return _loaded(str(folder), load_saved(folder, f"{KEY} {folder}"), dataset)


def _from_hub(dataset: Published, spec: str) -> Copy:
    import datasets

    name, _, subset = spec.partition(":")
    same = name.rpartition("/")[2].lower() == dataset.hub.rpartition("/")[2].lower()
    subset = subset or (dataset.subset if same else None)
    branch = dataset.revision if name == dataset.hub else None
    try:
        loaded: Any = datasets.load_dataset(name, subset or None, revision=branch)
    except Exception as error:  # the library raises many types, none with a remedy for a missing network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        revision = f" --revision {dataset.revision}" if dataset.revision else ""
        raise DataError(
            f"{spec!r} cannot be loaded from the hub: {reason}. Where there is no network, copy "
            f"{' and '.join(dataset.files)} of {dataset.page} into a folder here, from a machine that has one "
            f"(hf download {dataset.hub} --repo-type dataset{revision} --local-dir FOLDER), and give {KEY} FOLDER; "
            "where there is a mirror, set HF_ENDPOINT"
        ) from error
    return _loaded(f"{name}{f', subset {subset}' if subset else ''}, on the hub", loaded, dataset)


def _loaded(source: str, loaded: Any, dataset: Published) -> Copy:
    """Return the rows of a `Dataset`, as the first split, or the splits of a `DatasetDict`."""
    by_split = dict(loaded) if isinstance(loaded, dict) else {dataset.splits[0]: loaded}
    by_split = {SPLIT_WORDS.get(split, split): rows for split, rows in by_split.items()}
    splits = {
        split: [(Part(f"{source}, split {split}", without_decoding(rows), tuple(rows.column_names), source), {})]
        for split in dataset.splits
        if (rows := by_split.get(split)) is not None and len(rows)
    }
    if not splits:
        raise DataError(f"{source}: no rows in a split {' or '.join(dataset.splits)}; it has: {', '.join(by_split)}")
    others = [split for split in by_split if split not in splits]
    return Copy(source, splits, {"another split": others} if others else {})
