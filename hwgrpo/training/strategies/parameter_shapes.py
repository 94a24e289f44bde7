"""Shapes of a model's parameters, grouped by the unit that a strategy gathers at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of the model, or of an adapter on it."""

    name: str
    """Name within its unit: mlp.experts.down_proj."""
    shape: tuple[int, ...]
    is_adapter: bool = False
    tensor_dim: int | None = None
    """Dimension that tensor parallelism shards; None: it is replicated."""
    is_castable: bool = False
    """It may have the compute dtype if it is frozen; see `models.frozen_dtype`."""
    is_quantized: bool = False
    """`model.quantize` applies to it."""
    is_frozen: bool = False
    """It is of a part of a vision-language model that is not trained, where the rest is (`model.train_vision`)."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def tensor_shard(self, size: int) -> tuple[int, ...]:
        """Return the shape of the shard on each of `size` ranks of a tensor-parallel group."""
        if self.tensor_dim is None:
            return self.shape
        return tuple(n // size if dim == self.tensor_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class ParameterUnit:
    """A decoder layer, or everything outside decoder layers."""

    parameters: tuple[ParameterShape, ...]
    is_layer: bool = True
    copies: int = 1
    """Number of units in the model with these parameters."""

    @property
    def count(self) -> int:
        """Number of elements in one of them."""
        return sum(parameter.count for parameter in self.parameters)

    def only(self, *, adapters: bool) -> ParameterUnit:
        """Return the unit with only its adapters, or without them."""
        return self.where(lambda parameter: parameter.is_adapter == adapters)

    def where(self, condition: Callable[[ParameterShape], bool]) -> ParameterUnit:
        """Return the unit with only the parameters that fulfil a condition."""
        return replace(self, parameters=tuple(filter(condition, self.parameters)))


def count_elements(units: Sequence[ParameterUnit]) -> int:
    """Return the number of elements in units, copies included."""
    return sum(unit.copies * unit.count for unit in units)


def shard_elements(shape: tuple[int, ...], parts: int, *, by_rows: bool) -> int:
    """Return the elements that each of `parts` devices stores of a parameter, padding included.

    Args:
        shape: shape of the parameter.
        parts: devices that it is sharded over.
        by_rows: shard full rows of the first dimension, as torch's `fully_shard` does; each device stores as many rows
            as the first one (`FSDPParam.padded_sharded_param_size`). Otherwise shard the flattened parameter, as
            DeepSpeed's ZeRO does.
    """
    if not by_rows:
        return -(-math.prod(shape) // parts)
    rows, *rest = shape or (1,)
    return -(-rows // parts) * math.prod(rest)
