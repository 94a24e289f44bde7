"""Values in columns: frozen dataclasses whose fields have one entry per sequence, token, prompt or prompt token.

A column is declared once, as a field with the metadata of `per_sequence`, `per_token`, `per_prompt` or
`per_prompt_token`. Selecting, splitting, concatenating and storing read the declaration, so that a new column needs a
line in none of them. Further dimensions of a column are its own. Three fields are known by name: the tokens of sequence
i are `tokens[offsets[i]:offsets[i + 1]]`, `prompt_offsets` are the same of prompts, and `prompt_index` numbers them.
Other fields without a declaration have one value for all sequences.

This module is imported where torch must not be, as in reward workers: what needs torch imports it when called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from hwgrpo.errors import DataError
from hwgrpo.support.jsonlines import jsonable

if TYPE_CHECKING:
    import torch

NOTHING: Any = object()
"""`Column.missing` of a column that has no value for sequences without it."""
_COLUMN = "column"
_JOINED = "joined"


@dataclass(frozen=True)
class Column:
    """Declaration of a column: a tensor, a tuple, a mapping from names to tensors, or another ragged value."""

    per: Literal["sequence", "token", "prompt", "prompt_token"]
    missing: Any = NOTHING
    """Fills the entries of a part without the column when parts are concatenated: a value, or a function of the part;
    for prompts, a function that returns all entries. NOTHING: parts with and without it cannot be concatenated."""
    dtype: str = "float32"
    """torch's name of the dtype in which `missing` is written."""
    stored: str | None = None
    """Name in files; None: the field's."""
    names_key: str | None = None
    """For a mapping: JSON key of its names in files."""
    ragged_class: type[Ragged] | None = None
    """For a ragged value: its class."""
    written_by: Callable[[Any, str], tuple[dict[str, torch.Tensor], Any]] | None = None
    """For a tuple: (value, prefix of names) -> tensors by name, and JSON; None: its entries are JSON."""
    read_by: Callable[[Mapping[str, torch.Tensor], str, Any], Any] | None = None
    """Inverts `written_by`: (tensors, prefix of names, JSON) -> value."""

    def filling(self, part: Any) -> Any:
        """Return `missing` for a part."""
        return self.missing(part) if callable(self.missing) else self.missing


def per_sequence(**options: Any) -> dict[str, Column]:
    """Return the metadata of a field with one entry per sequence; for the options see `Column`."""
    return {_COLUMN: Column("sequence", **options)}


def per_token(**options: Any) -> dict[str, Column]:
    """Return the metadata of a field with one entry per response token; for the options see `Column`."""
    return {_COLUMN: Column("token", **options)}


def per_prompt_token(**options: Any) -> dict[str, Column]:
    """Return the metadata of a field with one entry per token of the prompts; for the options see `Column`."""
    return {_COLUMN: Column("prompt_token", **options)}


def per_prompt(**options: Any) -> dict[str, Column]:
    """Return the metadata of a field with one entry per prompt; for the options see `Column`."""
    return {_COLUMN: Column("prompt", **options)}


def per_batch(joined: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """Return the metadata of a field with one value, which parts keep; `joined` makes that of concatenated parts."""
    return {_JOINED: joined}


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return [S + 1] int64: the bounds of S runs of these lengths."""
    lengths = lengths.long()
    offsets = lengths.new_zeros(len(lengths) + 1)
    offsets[1:] = lengths.cumsum(0)
    return offsets


class Ragged:
    """Base of the dataclasses with columns.

    Example:
        >>> @dataclass(frozen=True)
        ... class Answers(Ragged):
        ...     tokens: torch.Tensor = field(metadata=per_token())
        ...     offsets: torch.Tensor
        ...     score: torch.Tensor = field(metadata=per_sequence())
        >>> answers = Answers(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]), torch.tensor([0.5, 1.0]))
        >>> answers.select(torch.tensor([False, True])).tokens
        tensor([8, 9])
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    offsets: torch.Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[S] int64: response lengths in tokens."""
        return self.offsets.diff()

    def per_token_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return [R, ...]: each token's entry of `values` [S, ...]."""
        return values.repeat_interleave(self.lengths, dim=0)

    def column(self, name: str) -> tuple[torch.Tensor, bool]:
        """Return a column's tensor, and whether it has one entry per token."""
        return getattr(self, name), self.__dataclass_fields__[name].metadata[_COLUMN].per == "token"

    def select(self, wanted: torch.Tensor) -> Self:
        """Return the sequences where `wanted` [S] bool is true, as copies, and all prompts."""
        of: dict[str, torch.Tensor] = {"sequence": wanted}
        changed: dict[str, Any] = {}
        if hasattr(self, "offsets"):
            of["token"] = self.per_token_of(wanted)
            changed["offsets"] = offsets_of(self.lengths[wanted])

        def part(value: Any, per: str) -> Any:
            if isinstance(value, Ragged):
                return value.select(wanted)
            return tuple(compress(value, wanted.tolist())) if isinstance(value, tuple) else value[of[per]]

        return self._with(changed, part)

    def split(self, counts: Iterable[int]) -> list[Self]:
        """Return runs of sequences, as copies. A value for all sequences stays behind, unless it is `per_batch`.

        Args:
            counts: sequences of each run; their sum is S.
        """
        bounds = [*accumulate(counts, initial=0)]
        return [self._run(first, end) for first, end in pairwise(bounds)]

    @classmethod
    def concat(cls, parts: Sequence[Self], prompts: Sequence[int] | None = None) -> Self:
        """Return the sequences of all parts, in order; the parts' prompts are numbered one after another.

        Args:
            parts: at least one.
            prompts: number of prompts of each part; None: of `prompt_offsets`.
        """
        import torch

        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, each = field.name, [getattr(part, field.name) for part in parts]
            if name in ("offsets", "prompt_offsets"):
                values[name] = offsets_of(torch.cat([bounds.diff() for bounds in each]))
            elif name == "prompt_index":
                if prompts is None:
                    prompts = [len(part.prompt_offsets) - 1 for part in parts]  # type: ignore[attr-defined]
                first = accumulate(prompts, initial=0)
                values[name] = torch.cat([index + start for index, start in zip(each, first, strict=False)])
            elif (column := field.metadata.get(_COLUMN)) is not None:
                joined = _join(name, column, parts)
                values |= {} if joined is None else {name: joined}
            elif (join := field.metadata.get(_JOINED)) is not None:
                values[name] = join(parts)
        return cls(**values)

    def to_tensors(self, prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return this value for a file: name after `prefix` -> tensor, and JSON values of what is no tensor."""
        tensors: dict[str, torch.Tensor] = {}
        values_json: dict[str, Any] = {}
        for field, column, stored in self._stored():
            value = getattr(self, field.name)
            if isinstance(value, Ragged):
                tensors |= value.to_tensors(f"{prefix}{stored}.")[0]
            elif column is not None and column.written_by is not None:
                made, values_json[stored] = column.written_by(value, f"{prefix}{stored}")
                tensors |= made
            elif column is not None and column.names_key is not None:
                values_json[column.names_key] = list(value)
                tensors |= {f"{prefix}{stored}.{name}": each for name, each in value.items()}
            elif hasattr(value, "dtype"):
                tensors[prefix + stored] = value
            elif value is not None:
                values_json[stored] = [*value.items()] if isinstance(value, Mapping) else jsonable(value)
        return tensors, values_json

    @classmethod
    def from_tensors(cls, prefix: str, tensors: Mapping[str, torch.Tensor], values_json: Mapping[str, Any]) -> Self:
        """Return the value of which `to_tensors` returned these; what an older file lacks has its default."""
        values: dict[str, Any] = {}
        for field, column, stored in cls._stored():
            if prefix + stored in tensors:
                values[field.name] = tensors[prefix + stored]
            elif column is not None and column.ragged_class is not None:
                inner = f"{prefix}{stored}."
                if f"{inner}offsets" in tensors:
                    values[field.name] = column.ragged_class.from_tensors(inner, tensors, {})
            elif column is not None and column.names_key is not None:
                names = values_json.get(column.names_key, ())
                values[field.name] = {name: tensors[f"{prefix}{stored}.{name}"] for name in names}
            elif stored in values_json and column is not None and column.read_by is not None:
                values[field.name] = column.read_by(tensors, f"{prefix}{stored}", values_json[stored])
            elif stored in values_json and column is not None:
                values[field.name] = tuple(values_json[stored])
            elif stored in values_json:
                value = values_json[stored]
                values[field.name] = dict(value) if field.default_factory is dict else value
        return cls(**values)

    @classmethod
    def _stored(cls) -> list[tuple[dataclasses.Field[Any], Column | None, str]]:
        """Return each field with its declaration and its name in files."""
        declared = [(field, field.metadata.get(_COLUMN)) for field in dataclasses.fields(cls)]
        return [(field, column, (column and column.stored) or field.name) for field, column in declared]

    def _with(self, changed: dict[str, Any], part: Callable[[Any, str], Any]) -> Self:
        """Return this value with `changed` fields, and each column that is present as `part(value, per)` returns it."""
        for field in dataclasses.fields(self):
            value, column = getattr(self, field.name), field.metadata.get(_COLUMN)
            if column is None or column.per in ("prompt", "prompt_token") or value is None or _is_empty(value):
                continue
            if isinstance(value, Mapping):
                changed[field.name] = {name: part(each, column.per) for name, each in value.items()}
            else:
                changed[field.name] = part(value, column.per)
        return dataclasses.replace(self, **changed)

    def _run(self, first: int, end: int) -> Self:
        """Return sequences `first` to `end` - 1, as copies."""
        runs = {"sequence": slice(first, end)}
        changed = {field.name: _default(field) for field in dataclasses.fields(self) if _has_one_value(field)}
        if hasattr(self, "offsets"):
            bounds = self.offsets[first : end + 1]
            runs["token"] = slice(int(bounds[0]), int(bounds[-1]))
            changed["offsets"] = bounds - bounds[0]

        def part(value: Any, per: str) -> Any:
            if isinstance(value, Ragged):
                return value._run(first, end)
            return value[runs[per]] if isinstance(value, tuple) else value[runs[per]].clone()

        return self._with(changed, part)


def _has_one_value(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has one value for all sequences, which parts do not have."""
    return not field.metadata and field.name not in ("offsets", "prompt_offsets")


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple) and not value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _join(name: str, column: Column, parts: Sequence[Ragged]) -> Any:
    """Return the concatenated entries of a column; None if no part has it.

    Raises:
        DataError: one part has it, another with sequences does not, and nothing fills its entries.
    """
    import torch

    parts = [part for part in parts if len(part)] or parts  # parts without sequences decide nothing
    each = [getattr(part, name) for part in parts]
    lacks = [_is_absent(column, value) for value in each]
    if all(lacks) and column.per in ("prompt", "prompt_token"):
        return None
    if all(lacks) and (column.missing is NOTHING or len({repr(column.filling(part)) for part in parts}) < 2):
        return None
    present = next((value for value, absent in zip(each, lacks, strict=True) if not absent), None)
    if any(lacks):
        if column.missing is NOTHING:
            raise DataError(f"responses with and without {name} cannot be trained in one step")
        filled = zip(parts, each, lacks, strict=True)
        each = [_filled(column, part, present) if absent else value for part, value, absent in filled]
    if isinstance(each[0], Ragged):
        return type(each[0]).concat(each)
    if isinstance(each[0], Mapping):
        if len({frozenset(value) for value in each}) > 1:
            names = ", ".join(sorted({key for value in each for key in value}))
            raise DataError(f"responses with other names of {name} cannot be trained in one step; there are: {names}")
        return {key: torch.cat([value[key] for value in each]) for key in each[0]}
    if isinstance(each[0], tuple):
        return tuple(entry for value in each for entry in value)
    return torch.cat(each)


def _is_absent(column: Column, value: Any) -> bool:
    if isinstance(value, tuple) and column.per == "prompt":
        return not value
    if isinstance(value, tuple) and column.missing is not NOTHING:
        return all(entry == column.missing for entry in value)
    return value is None


def _filled(column: Column, part: Ragged, present: Any) -> Any:
    """Return the entries of a part that lacks a column; `present` is the column of a part that has it, if one has."""
    import torch

    if column.per in ("prompt", "prompt_token"):
        return column.filling(part)
    if isinstance(present, tuple):
        return (column.missing,) * len(part)
    rows = len(part) if column.per == "sequence" else int(part.lengths.sum())
    further = () if present is None else present.shape[1:]
    return torch.full((rows, *further), column.filling(part), dtype=getattr(torch, column.dtype))
