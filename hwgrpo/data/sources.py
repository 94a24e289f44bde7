"""Sources in `data.train` or `data.validation` -> rows: tasks, files, folders, hub datasets and rows in memory."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.catalog import TASK_SCHEMES
from hwgrpo.data import reasoning_gym_rows
from hwgrpo.data.formats import READERS, TABLES, Part, Row, read_file
from hwgrpo.data.given_rows import rows_of_object
from hwgrpo.data.media import without_decoding
from hwgrpo.data.tasks import PREFIX, parse_task
from hwgrpo.errors import DataError, choice_error, error_text, escaped, nearest, shown
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import check_address
from hwgrpo.support.given_objects import is_object
from hwgrpo.support.paths import check_path, did_you_mean, same_spelling

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
OTHER_FORMATS = (".txt", ".arrow", ".xlsx")
"""Suffixes of unsupported data files, by which a name is still recognized as a file."""
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Part of a file name -> split, as in the library `datasets`."""


class Rows(Sequence[Row]):
    """Concatenation of the rows of one or more files.

    Args:
        parts: the files; at least one.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.columns = tuple(dict.fromkeys(column for part in self.parts for column in part.columns))
        self._ends = list(itertools.accumulate(len(part.rows) for part in self.parts))
        self._folders = [_folder_of(part.name) for part in self.parts]  # now: the directory may change

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        part, row = self._find(index)
        return part.rows[row]

    def place(self, index: int) -> str:
        """Return the file and line of a row."""
        part, row = self._find(index)
        return part.place(row)

    def source(self, index: int) -> str:
        """Return the name of the file, task or hub dataset that a row is from."""
        return self._find(index)[0].source

    def folder(self, index: int) -> Path:
        """Return the folder at which relative paths in a row begin: that of its file, else the current one."""
        number = bisect.bisect_right(self._ends, index)
        return self._folders[number]

    def tools(self, index: int) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools that the chat template shows for a row."""
        return ()

    def _find(self, index: int) -> tuple[Part, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def _folder_of(name: str) -> Path:
    path = Path(name).absolute()
    if path.is_dir():
        return path
    return path.parent if path.is_file() else Path.cwd()


def sources_of(spec: str | Sequence[str] | None) -> list[str]:
    """Return a setting's sources as a list."""
    if not spec:
        return []
    return [spec] if isinstance(spec, str) else list(spec)


def open_all(spec: str | Sequence[str], split: str, which: str) -> Rows:
    """Find and read all rows for training or validation, concatenating several sources.

    Args:
        spec: value of `data.train` or `data.validation`.
        split: the split of sources that have several; tasks have their own.
        which: "train" or "validation".

    Raises:
        ConfigError, DataError: as `open_rows` does.
    """
    parts: list[Part] = []
    for source in sources_of(spec):
        parts += open_rows(source, which if is_generated(source) else split, f"data.{which}").parts
    return Rows(parts)


def validation_source(config: Any) -> str | Sequence[str] | None:
    """Return the source of the validation: `data.validation`, else a task's own; None where there is none.

    Args:
        config: the `data` settings (`DataConfig`).

    Raises:
        ConfigError: as `open_rows` does.
    """
    if config.validation or not isinstance(config.train, str) or not is_generated(config.train):
        return config.validation or None
    if config.train.startswith(PREFIX):
        return config.train
    check_address(config.train, "data.train")
    return reasoning_gym_rows.own_validation(config.train, config.validation_max_rows)


def is_generated(spec: str) -> bool:
    """Return whether a source is a task, whose rows are made here, with splits of its own."""
    return spec.startswith(TASK_SCHEMES)


def open_rows(spec: str, split: str, key: str) -> Rows:
    """Find and read the rows of one source.

    Args:
        spec: `task://...`, `reasoning_gym://...`, `object://...`, a file, a folder (of data files, or made by
            `save_to_disk`), or a hub name (`owner/name`, or `owner/name:subset`).
        split: the split of a task, a folder with several, or a hub dataset.
        key: the setting, for messages ("data.train").

    Raises:
        ConfigError: an unknown task or task option, or the package of a task is missing.
        DataError: the source does not exist or is broken.
    """
    if spec.startswith(PREFIX):
        splits = parse_task(spec).splits
        if split not in splits:
            raise choice_error(f"{key}={spec}: split", split, splits)
        return Rows([Part(spec, splits[split], tuple(splits[split][0]), spec)])
    if spec.startswith(reasoning_gym_rows.PREFIX):
        check_address(spec, key)
        rows = reasoning_gym_rows.task_rows(spec, split)
        return Rows([Part(spec, rows, tuple(rows[0]), spec)])
    if is_object(spec):
        return Rows([rows_of_object(spec, key)])
    path = find_data(spec, key)
    if path is None:
        return _open_hub(spec, split, key)
    return _open_folder(path, split, key) if path.is_dir() else Rows([read_file(path)])


def find_data(spec: str, key: str) -> Path | None:
    """Return the file or folder that a setting names, or None for a hub name.

    Args:
        spec: a file, a folder or a hub name.
        key: the setting, for messages ("data.train").

    Raises:
        ConfigError: the operating system does not accept the name.
        DataError: the file or folder does not exist, or has an unsupported format.
    """
    check_path(spec, key)
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    suffix = path.suffix.lower()
    if path.is_file():
        if suffix not in READERS:
            raise DataError(
                f"{key}={spec!r}: {path.suffix or 'no suffix'} is not a data file; use {', '.join(READERS)}"
            )
        return path
    if path.exists():
        raise DataError(f"{key}={shown(spec)} is neither a file nor a folder but a pipe or a device; copy it to a file")
    like_file = suffix in OTHER_FORMATS or nearest(suffix, READERS) is not None
    if like_file or spec.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(spec):
        hint = (
            did_you_mean(path, _may_be_data) or f" Check the path (looked for {escaped(str(path.absolute()), 1000)})."
        )
        raise DataError(f"{key}={spec!r}: no such file or folder.{hint}")
    # Where the folder `data` exists, `data/train` more likely means data/train.jsonl than the dataset `train` of the
    # hub's owner `data`. A bare `gsm8k` may be either, gsm8k.jsonl or not.
    if near := same_spelling(path, _may_be_data, stem="/" in spec):
        raise DataError(f"{key}={spec!r}: no such file or folder. Did you mean {near}?")
    return None


def _may_be_data(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in READERS


def _open_folder(folder: Path, split: str, key: str) -> Rows:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        saved: Any = load_saved(folder, str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(_no_split(folder, split, key, saved))
            saved = saved[split]
        return _dataset(str(folder), saved, folder.name)
    files = [folder / file for file in data_files_in(folder, key, "**/*")]
    if not files:
        raise DataError(f"{key}: folder {str(folder)!r} has no data files ({', '.join(READERS)})")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
    if set(by_split) != {None}:  # some file names a split, so the requested split must be among them
        wanted = SPLIT_WORDS.get(split, split)
        if wanted not in by_split:
            raise DataError(_no_split(folder, split, key, [name for name in by_split if name]))
        if None in by_split:
            raise DataError(
                f"{key}: in folder {str(folder)!r} some files name a split and {by_split[None][0].name} names none; "
                "name a file instead of the folder, or put the split into every name"
            )
        files = by_split[wanted]
    tables = [file for file in files if file.suffix.lower() in TABLES]
    others = [file for file in files if file not in tables]
    if tables and others:
        raise DataError(
            f"{key}: folder {str(folder)!r} holds {tables[0].name} beside {others[0].name}; name the files that are "
            f"meant, e.g. {key}=[{others[0]},{tables[0]}]"
        )
    return Rows([read_file(file) for file in files])


def data_files_in(folder: Path, key: str, pattern: str = "*") -> list[Path]:
    """Return the data files of a folder, relative to it and sorted, without hidden ones.

    Args:
        folder: the folder.
        key: the setting, for messages ("data.train").
        pattern: of `Path.glob`; "**/*" for those of the folders below, too.

    Raises:
        DataError: a folder cannot be read.
    """
    try:
        files = [file for file in folder.glob(pattern) if file.suffix.lower() in READERS and file.is_file()]
    except (OSError, RecursionError) as error:
        raise DataError(
            f"{key}: folder {str(folder)!r} cannot be read ({error_text(error, 200)}); name its files instead"
        ) from error
    relative = sorted(file.relative_to(folder) for file in files)
    return [file for file in relative if not any(part.startswith(".") for part in file.parts)]


def load_saved(folder: Path, name: str) -> Any:
    """Return the dataset that `save_to_disk` wrote to a folder.

    Raises:
        DataError: it is damaged; the message begins with the name.
    """
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # of a damaged folder the library raises whatever its content leads to
        raise DataError(f"{name}: a damaged dataset folder ({error_text(error, 300)}); save it again") from error


def split_of(file: Path) -> str | None:
    """Return the split in a file name, or else in the nearest folder name."""
    for name in reversed(file.parts):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _no_split(where: Any, split: str, key: str, present: Any) -> str:
    setting = "data.split" if key == "data.train" else "data.validation_split"
    return f"{setting}={split!r}: {where} has no such split; it has: {', '.join(sorted(present))}"


def _open_hub(spec: str, split: str, key: str) -> Rows:
    import datasets

    name, _, subset = spec.partition(":")
    try:
        loaded: Any = datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # the library raises many types, none with the setting to change
        raise DataError(
            f"{key}={spec!r}: not a file here, and as a hub dataset (split {split!r}) it cannot be loaded: {error}. "
            "Remedies: check the name (owner/name, or owner/name:subset) and the split; log in for a gated one; "
            "without network, download it elsewhere and give the folder that `save_to_disk` wrote."
            f"{did_you_mean(Path(name), _may_be_data)}"
        ) from error
    return _dataset(spec, loaded, name)


def _dataset(name: str, loaded: Any, source: str) -> Rows:
    if not len(loaded):
        raise DataError(f"{name}: the dataset has no rows")
    return Rows([Part(name, without_decoding(loaded), tuple(loaded.column_names), source)])
