"""The tensors of a checkpoint: each rank's shards in its own files, loadable by any other sharding.

Each rank writes its own shards, flattened and under the parameter's name, into `weights-rankR.safetensors` and
`moments-rankR.safetensors`; the table of shards lists the elements of each. A loading rank reads only its own elements,
so the number of ranks and the strategy may differ from those of the saving run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hwgrpo.errors import CheckpointError
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.strategies.muon import MOMENTUM
from hwgrpo.training.strategies.param_shard import ADAMW_STATES, ParamShard

Table = dict[str, dict[str, Any]]
"""Parameter -> its full `shape`, its number of `updates`, its shards, `pieces`: [rank, first element, count], and its
optimizer `states` where they are not AdamW's."""


def files_of(shards: Sequence[ParamShard], rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return file name -> tensors of a rank's files."""
    held = [shard for shard in shards if shard.count]
    return {
        weights_file(rank): {shard.name: shard.values["parameter"] for shard in held},
        moments_file(rank): {
            f"{shard.name}.{key}": value for shard in held for key, value in shard.values.items() if key != "parameter"
        },
    }


def weights_file(rank: int) -> str:
    """Return the name of a rank's file with parameters."""
    return f"weights-rank{rank}.safetensors"


def moments_file(rank: int) -> str:
    """Return the name of a rank's file with optimizer states."""
    return f"moments-rank{rank}.safetensors"


def table_of(shards: Sequence[ParamShard], rank: int) -> Table:
    """Return the table of one rank's shards."""
    return {
        shard.name: {
            "shape": list(shard.shape),
            "updates": 0 if shard.step is None else int(shard.step),
            "pieces": [[rank, shard.start, shard.count]],
            **({"states": [MOMENTUM]} if MOMENTUM in shard.values else {}),
        }
        for shard in shards
        if shard.count
    }


def merge_tables(tables: Sequence[Table]) -> Table:
    """Merge the tables of all ranks; assert that every element is in exactly one shard."""
    joined: Table = {}
    for table in tables:
        for name, entry in table.items():
            joined.setdefault(name, entry | {"pieces": []})["pieces"] += entry["pieces"]
    for name, entry in joined.items():
        entry["pieces"].sort(key=lambda shard: shard[1])
        end = 0
        for _, start, count in entry["pieces"]:
            assert start == end, f"{name}: elements {min(start, end)} to {max(start, end)} are in no shard or in two"
            end = start + count
        assert end == math.prod(entry["shape"]), f"{name}: elements from {end} on are in no shard"
    return joined


def is_count(value: Any) -> bool:
    """Return whether a value read from JSON is an integer of zero or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_table(manifest: Path, table: Any, names: Any) -> None:
    """Check that a table covers every parameter once, with shards in listed files.

    Args:
        manifest: path of the manifest, for messages.
        table: a `Table`, not checked yet.
        names: the manifest's file names, not checked yet.

    Raises:
        CheckpointError: the table is not valid.
    """
    try:
        for name, entry in table.items():
            numbers = [*entry["shape"], entry["updates"], *(n for shard in entry["pieces"] for n in shard)]
            if not all(map(is_count, numbers)):
                raise CheckpointError(f"{manifest} is damaged: the numbers of {name} cannot be read")
            end, total = 0, math.prod(entry["shape"])
            for rank, start, count in entry["pieces"]:
                if start != end or count < 1:
                    raise CheckpointError(f"{manifest} is damaged: no shard has the elements of {name} from {end} on")
                end = start + count
                for file in (weights_file(rank), moments_file(rank)):
                    if file not in names:
                        raise CheckpointError(
                            f"{manifest} is damaged: a shard of {name} is in {file}, which it does not list"
                        )
            if end != total:
                raise CheckpointError(f"{manifest} is damaged: its shards have {end} of the {total} elements of {name}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{manifest} is damaged: its table of parameters cannot be read") from error


def check_file(path: Path, table: Table) -> None:
    """Check that a rank's file of weights or optimizer states has the table's tensors; skip other files.

    Raises:
        CheckpointError: its tensors differ.
    """
    expected: dict[str, list[int]] = {}
    for name, entry in table.items():
        for rank, _, count in entry["pieces"]:
            if path.name == weights_file(rank):
                expected[name] = [count]
            elif path.name == moments_file(rank):
                expected |= {f"{name}.{key}": [count] for key in entry.get("states", ADAMW_STATES)}
    if not expected:
        return
    with checkpoint_files.reading(path), safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  (it is no dict)
    for name in expected.keys() | shapes.keys():
        if shapes.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path} is not the file of the manifest's table: {name} has shape {shapes.get(name)} in it, "
                f"{expected.get(name)} in the table"
            )


def check_parameters(folder: Path, table: Table, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint has the parameters of a model.

    Args:
        folder: folder of the checkpoint, for messages.
        table: the checkpoint's table.
        shapes: name -> full shape of the model's trainable parameters.

    Raises:
        CheckpointError: the model's trainable parameters differ from the saved ones.
    """
    unmatched = sorted(table.keys() ^ {name for name, shape in shapes.items() if math.prod(shape)})
    if unmatched:
        raise CheckpointError(
            f"{folder} was saved by another model or LoRA setting: {len(unmatched)} parameters are in one and not "
            f"in the other, e.g. {unmatched[0]}"
        )
    for name, entry in table.items():
        saved, shape = tuple(entry["shape"]), tuple(shapes[name])
        if shape != saved:
            raise CheckpointError(f"{folder}: {name} has shape {saved}, the model's is {shape}")


@torch.no_grad()
def read(
    folder: Path, table: Table, shards: Sequence[ParamShard], file_of: Callable[[int], str] = weights_file
) -> None:
    """Load a checkpoint's values into shards, whatever its own sharding.

    Args:
        folder: folder of the checkpoint.
        table: the checkpoint's table.
        shards: this rank's shards; those without optimizer states get only their parameter.
        file_of: rank -> name of its file with parameters.

    Raises:
        CheckpointError: a file cannot be read any more.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def values(file: str, key: str, first: int, last: int) -> torch.Tensor:
            with checkpoint_files.reading(folder / file):
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                return opened[file].get_slice(key)[first:last]

        for shard in shards:
            if not math.prod(shard.shape):
                continue  # a parameter without elements is in no table
            entry = table[shard.name]
            for rank, source, target, count in _overlaps(entry["pieces"], shard):
                part = slice(target, target + count)
                shard.values["parameter"][part] = values(file_of(rank), shard.name, source, source + count)
                for key in entry.get("states", ADAMW_STATES):
                    if key in shard.values:
                        saved = values(moments_file(rank), f"{shard.name}.{key}", source, source + count)
                        shard.values[key][part] = saved
            if shard.step is not None:
                shard.step.fill_(entry["updates"])


def _overlaps(saved: Sequence[Sequence[int]], shard: ParamShard) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, first element in the saved shard, first element in `shard`, count) of each overlap."""
    end = shard.start + shard.count
    for rank, start, count in saved:
        first, last = max(start, shard.start), min(start + count, end)
        if first < last:
            yield rank, first - start, first - shard.start, last - first
