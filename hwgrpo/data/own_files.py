"""Files of the user's own -> rows in verl's schema, and a validation split of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hwgrpo.data.convert import Converted
from hwgrpo.data.dataset_files import Copy
from hwgrpo.data.formats import Broken, Part, Row, read_file
from hwgrpo.data.published import Conversion
from hwgrpo.data.raw_rows import own_columns
from hwgrpo.data.row_schema import identity
from hwgrpo.data.sources import find_data, split_of
from hwgrpo.errors import ConfigError, DataError, escaped

KEY = "FILE"


def open_files(names: Sequence[str]) -> Copy:
    """Read files. The split of a file is that in its name; "train" where it has none.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    splits: dict[str, list[tuple[Part, Broken]]] = {}
    for name in names:
        path = find_data(name, KEY)
        if path is None or path.is_dir():
            where = escaped(str(Path(name).absolute()), 1000)
            what = "is a folder; name its files" if path else f"no such file (looked for {where})"
            raise DataError(f"{KEY}={name!r}: {what}")
        broken: Broken = {}
        splits.setdefault(split_of(Path(path.name)) or "train", []).append((read_file(path, broken), broken))
    ordered = sorted(splits, key=lambda name: (name != "train", name))
    return Copy(", ".join(names), {split: splits[split] for split in ordered}, {})


def own_conversion(
    title: str, prompt_key: str, answer_key: str | None, reward: str | None, data_source: str
) -> Conversion:
    """Return the conversion of files that name their columns.

    Args:
        title: name in the report.
        prompt_key: column with the prompt.
        answer_key: column with the ground truth; None is the first of the usual ones, "" none.
        reward: the reward that will score the rows, None where it is not known.
        data_source: what rows carry as `data_source`.
    """
    named = (prompt_key, answer_key) if answer_key and "." not in answer_key else (prompt_key,)
    return Conversion(
        title=title,
        columns=named,
        example=own_columns(prompt_key, answer_key),
        data_source=data_source,
        reward=reward,
        ability="other",
        separator=" ",
    )


def validation_size(text: str) -> int | float:
    """Return a number of prompts, or a share of them, from an argument.

    Raises:
        ConfigError: it is neither.
    """
    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value >= 1 if isinstance(value, int) else 0 < value < 1:
        return value
    raise ConfigError(f"--validation {text}: use a number of prompts, 1 or more, or a share of them such as 0.05")


def split_off(converted: Mapping[str, Converted], validation: int | float) -> dict[str, Converted]:
    """Move prompts of the training rows to a validation split.

    The hash of a prompt decides, so that the same prompts are moved whatever the order of the rows, and equal prompts
    are on the same side.

    Args:
        converted: the splits.
        validation: number of prompts, or their share, of which at least one is moved.

    Raises:
        ConfigError: there is a validation split, no training split, or nothing would be left to train on.
    """
    train = converted.get("train")
    if train is None or "validation" in converted:
        raise ConfigError(f"--validation takes rows of train, and the files are of {' and '.join(converted)}")
    hashes = [hashlib.sha256(identity(row["prompt"]).encode()).digest() for row in train.rows]
    ordered = sorted(set(hashes))
    size = validation if isinstance(validation, int) else max(1, round(validation * len(ordered)))
    if size >= len(ordered):
        raise ConfigError(f"--validation {validation}: train has {len(ordered)} prompts; leave some to train on")
    moved = set(ordered[:size])
    sides: dict[bool, list[Row]] = {False: [], True: []}
    for row, key in zip(train.rows, hashes, strict=True):
        side = key in moved
        sides[side].append({**row, "extra_info": {**row["extra_info"], "split": "validation"}} if side else row)
    rest = {split: each for split, each in converted.items() if split != "train"}
    held_out = Converted(len(sides[True]), sides[True], (), {})
    return {"train": replace(train, rows=sides[False]), "validation": held_out, **rest}
