"""Over how many devices a strategy shards each kind of state, as memory and time depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hwgrpo.training.strategies.parameter_shapes import ParameterUnit, count_elements, shard_elements

NOTED_PADDING = 0.1
"""Smallest share of padding in the stored parameters that a plan mentions."""


@dataclass(frozen=True)
class Sharding:
    """Number of shards of each kind of state; a device holds one shard."""

    parameters: int = 1
    gradients: int = 1
    optimizer_states: int = 1
    masters: int | None = None
    """Shards of separate fp32 masters; None: the optimizer steps the parameters themselves."""
    in_compute_dtype: bool = False
    """Parameters are stored in the compute dtype instead of fp32."""
    gathered_units: int | Literal["all"] | None = None
    """Decoder layers gathered at the same time, beside everything outside layers; None: nothing is gathered."""
    syncs_once: bool = False
    """Weights, where sharded, are gathered and gradients reduced once per update instead of once per micro-batch."""
    keeps_gradients: bool = False
    """Gradients keep their memory during rollout."""
    offloads_optimizer: bool = False
    """Optimizer states and masters are in the host's memory."""
    offloads_gradients: bool = False
    """Gradients are summed in the host's memory."""
    offloads_parameters: bool = False
    """Sharded parameters are in the host's memory."""
    by_rows: bool = False
    """Full rows of a parameter's first dimension are sharded, padded to the same number; otherwise elements."""
    tensor: int = 1
    """Tensor-parallel size; `parameters` and the other numbers include it as a factor."""
    ranks: int = 1
    """Devices of the run: each copies this fraction of a checkpoint before writing it."""

    def stored_elements(self, units: Sequence[ParameterUnit], parts: int) -> int:
        """Return the elements that a device stores of units with `parts` shards, padding included."""
        return sum(
            unit.copies * shard_elements(p.tensor_shard(self.tensor), parts // self.tensor, by_rows=self.by_rows)
            for unit in units
            for p in unit.parameters
        )

    def computed_elements(self, unit: ParameterUnit) -> int:
        """Return the elements of one such unit that a device computes with: all, or its tensor-parallel shard."""
        return sum(math.prod(p.tensor_shard(self.tensor)) for p in unit.parameters)

    def gathered_elements(self, unit: ParameterUnit) -> int:
        """Return the elements of one such unit with gathered parameters, padding included."""
        return self.gather_ranks * self.stored_elements([unit], self.parameters) // unit.copies

    @property
    def gather_ranks(self) -> int:
        """Number of devices that gather parameters from each other."""
        return self.parameters // self.tensor

    def padding_note(self, units: Sequence[ParameterUnit]) -> str | None:
        """Return why more devices do not reduce the state per device, where padding is a tenth of it or more."""
        share = self.stored_elements(units, self.parameters) * self.parameters
        even = count_elements(units)
        if not self.by_rows or share < (1 + NOTED_PADDING) * even:
            return None
        padding = {
            (p.name, p.tensor_shard(self.tensor)[0]): unit.copies
            * (self.gathered_elements(alone) - self.computed_elements(alone))
            for unit in units
            for p in unit.parameters
            for alone in [replace(unit, parameters=(p,))]
        }
        name, rows = max(padding, key=lambda each: padding[each])
        return (
            f"{share / even:.1f} times an even share: fully_shard splits the {rows:,} rows of {name}; "
            f"no less state beyond {rows * self.tensor:,} devices"
        )

    @property
    def keeps_full_parameters(self) -> bool:
        """Whether a device has the full parameters, so that a local engine can sample from them."""
        return self.parameters == 1
