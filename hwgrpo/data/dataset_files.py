"""Sources of a published dataset's rows: local files, a folder of `save_to_disk`, or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.data.formats import READERS, TABLES, Broken, Part, read_file
from hwgrpo.data.published import Published
from hwgrpo.data.sources import find_data, split_of
from hwgrpo.errors import DataError

SPLITS = ("train", "test")
KEY = "--source"


@dataclass(frozen=True)
class Copy:
    """The rows of a published dataset at their source."""

    source: str
    """The source, for messages."""
    splits: Mapping[str, Sequence[tuple[Part, Broken]]]
    """Split ("train", "test" or both) -> its files, with the errors of broken rows."""
    skipped: Mapping[str, Sequence[str]]
    """Reason why files were skipped -> their names."""


def open_copy(dataset: Published, spec: str | None) -> Copy:
    """Find and read a published dataset.

    Args:
        dataset: which one.
        spec: a file, a folder or a hub name; None is the dataset's own hub name.

    Raises:
        DataError: nothing found, a file cannot be read, or there are no rows for training or testing.
    """
    spec = spec or dataset.hub
    path = find_data(spec, KEY)
    if path is None:
        return _from_hub(dataset, spec)
    if path.is_file():
        split = split_of(Path(path.name)) or "train"
        if split not in SPLITS:
            raise DataError(
                f"{KEY} {path}: its name implies the split {split!r}, and only train and test are made; rename it"
            )
        return Copy(str(path), {split: [_read(path, dataset)]}, {})
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path)
    return _from_folder(dataset, path)


def _from_folder(dataset: Published, folder: Path) -> Copy:
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.suffix.lower() in READERS]
    files = [file for file in files if file.suffix.lower() not in TABLES] or files
    files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    files = [file for file in files if (folder / file).is_file()]
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
        by_split.setdefault(split_of(file) or "train", []).append(file)
    if not set(by_split) & set(SPLITS):
        raise DataError(
            f"{KEY} {folder}: its files are of the split {', '.join(sorted(by_split))}; train or test is needed"
        )
    for split in set(by_split) - set(SPLITS):
        skipped[f"of the split {split}"] = [str(file) for file in by_split[split]]
    splits = {
        split: [_read(folder / file, dataset) for file in by_split[split]] for split in SPLITS if split in by_split
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
    except ValueError:  # `read_file` reports the error
        return None
    return content if isinstance(content, dict) and dataset.question in content else None


def _saved(folder: Path) -> Copy:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{KEY} {folder}: a damaged dataset folder ({error}); save it again") from error
    return _loaded(str(folder), loaded)


def _from_hub(dataset: Published, spec: str) -> Copy:
    import datasets

    name, _, subset = spec.partition(":")
    same = name.rpartition("/")[2].lower() == dataset.hub.rpartition("/")[2].lower()
    subset = subset or (dataset.subset if same else None)
    try:
        loaded: Any = datasets.load_dataset(name, subset or None)
    except Exception as error:  # the library raises many types, none with a remedy for a missing network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{spec!r} cannot be loaded from the hub: {reason}. Where there is no network, copy "
            f"{' and '.join(dataset.files)} of {dataset.page} into a folder here, from a machine that has one "
            f"(hf download {dataset.hub} --repo-type dataset --local-dir FOLDER), and give {KEY} FOLDER; where there "
            "is a mirror, set HF_ENDPOINT"
        ) from error
    return _loaded(f"{name}{f', subset {subset}' if subset else ''}, on the hub", loaded)


def _loaded(source: str, loaded: Any) -> Copy:
    """Return the rows of a `Dataset`, as training data, or the train and test splits of a `DatasetDict`."""
    by_split = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    splits = {
        split: [(Part(f"{source}, split {split}", by_split[split], tuple(by_split[split].column_names), source), {})]
        for split in SPLITS
        if split in by_split and len(by_split[split])
    }
    if not splits:
        raise DataError(f"{source}: no rows in a split train or test; it has: {', '.join(by_split)}")
    others = [split for split in by_split if split not in splits]
    return Copy(source, splits, {"another split": others} if others else {})
