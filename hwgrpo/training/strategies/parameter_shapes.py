"""Shapes of a model's parameters, grouped by the unit that a strategy gathers at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of the model, or of an adapter on it."""

    name: str
    """In its unit: mlp.experts.down_proj."""
    shape: tuple[int, ...]
    is_adapter: bool = False
    tensor_dim: int | None = None
    """The dimension that tensor parallelism shards; None: every rank of a group has all of it."""

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def tensor_shard(self, size: int) -> tuple[int, ...]:
        """Return the shape of the part that each of `size` ranks of a tensor-parallel group has."""
        if self.tensor_dim is None:
            return self.shape
        return tuple(n // size if dim == self.tensor_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class ParameterUnit:
    """A decoder layer, or all that is in none."""

    parameters: tuple[ParameterShape, ...]
    is_layer: bool = True
    copies: int = 1
    """Units of the model with the same parameters."""

    @property
    def count(self) -> int:
        """How many elements one of them has."""
        return sum(parameter.count for parameter in self.parameters)

    def only(self, *, adapters: bool) -> ParameterUnit:
        """Return the unit with its adapters alone, or without them."""
        return replace(self, parameters=tuple(p for p in self.parameters if p.is_adapter == adapters))


def count_elements(units: Sequence[ParameterUnit]) -> int:
    """Return how many elements units have."""
    return sum(unit.copies * unit.count for unit in units)


def shard_elements(shape: tuple[int, ...], parts: int, *, by_rows: bool) -> int:
    """Return the elements that each of `parts` devices stores of a parameter, padding included.

    Args:
        shape: of the parameter.
        parts: devices that it is sharded over.
        by_rows: torch's `fully_shard`: a device gets whole rows of the first dimension, and stores as many of them as
            the first device (`FSDPParam.padded_sharded_param_size`). Else elements of the flattened parameter, as
            DeepSpeed's ZeRO has them.
    """
    if not by_rows:
        return -(-math.prod(shape) // parts)
    rows, *rest = shape or (1,)
    return -(-rows // parts) * math.prod(rest)
