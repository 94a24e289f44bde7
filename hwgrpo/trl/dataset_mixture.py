"""A mixture of datasets, as `trl grpo` reads it from a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError
from hwgrpo.trl.grpo_config import argument

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of `datasets.load_dataset`, the columns that are kept, and its share."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """A mixture of datasets.

    Example:
        DatasetMixtureConfig(datasets=[DatasetConfig("json", data_files="rows.jsonl")], test_split_size=0.1)
    """

    datasets: list[DatasetConfig] = field(default_factory=list, metadata={"help": "path, name, split, columns ..."})
    streaming: bool = argument("streaming", False)
    test_split_size: float | None = argument("test_split_size", None)

    def __post_init__(self) -> None:
        """Read mappings of a YAML file as datasets.

        Raises:
            ConfigError: streaming, or an unknown field.
        """
        if self.streaming:
            raise ConfigError("streaming=true: the rows of a mixture are read at once; leave it out")
        known = DatasetConfig.__dataclass_fields__
        for each in self.datasets:
            unknown = [name for name in each if name not in known] if isinstance(each, dict) else []
            if unknown:
                raise ConfigError(f"datasets: unknown fields {', '.join(unknown)}; there are {', '.join(known)}")
        self.datasets = [DatasetConfig(**each) if isinstance(each, dict) else each for each in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Load a mixture: its datasets one after another as `train`, and with test_split_size a part of them as `test`.

    Raises:
        ConfigError: there are no datasets, or some have a fraction and others none.
    """
    from datasets import DatasetDict, concatenate_datasets, load_dataset

    configs = mixture_config.datasets
    if not configs:
        raise ConfigError("datasets is empty: give a list of entries with path")
    parts: list[Dataset] = []
    for each in configs:
        files = {"data_dir": each.data_dir, "data_files": each.data_files}
        part: Any = load_dataset(each.path, each.name, split=each.split, **files)
        parts.append(part if each.columns is None else part.select_columns(each.columns))
    counts = _rows_kept([len(part) for part in parts], [each.fraction for each in configs])
    mixture = concatenate_datasets([part.select(range(count)) for part, count in zip(parts, counts, strict=True)])
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": mixture})
    return mixture.train_test_split(test_size=mixture_config.test_split_size)


def _rows_kept(rows: Sequence[int], fractions: Sequence[float | None]) -> list[int]:
    """Return the first rows of each dataset that a mixture keeps, so that each has its share.

    Raises:
        ConfigError: some datasets have a fraction and others none, or no fraction is above 0.
    """
    shares = [share for share in fractions if share is not None]
    if not shares:
        return list(rows)
    if len(shares) < len(rows) or min(shares) < 0 or not sum(shares):
        raise ConfigError(f"datasets: fraction={list(fractions)}; give each dataset one, 0 or above, or none of them")
    weights = [share / sum(shares) for share in shares]
    total = min(count / weight for count, weight in zip(rows, weights, strict=True) if weight)
    return [round(weight * total) for weight in weights]
