"""Into how many parts a strategy shards a run's state, as far as memory and time depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hwgrpo.training.strategies.parameter_shapes import ParameterUnit, count_elements, shard_elements

NOTED_PADDING = 0.1
"""Share of the parameters from which on a plan says that padding is stored."""


@dataclass(frozen=True)
class Sharding:
    """Into how many parts each kind of state is cut; a device holds one part."""

    parameters: int = 1
    gradients: int = 1
    moments: int = 1
    masters: int | None = None
    """Parts of fp32 masters beside the parameters; None: the optimizer steps the parameters themselves."""
    narrow: bool = False
    """Parameters are in the compute dtype; else in fp32."""
    units: int | Literal["all"] | None = None
    """Decoder layers whose weights are whole at a time, beside all that is no layer; None where nothing is gathered."""
    keeps_gradients: bool = False
    """The memory of gradients stays with the strategy during rollout."""
    offloads_moments: bool = False
    """AdamW's moments and masters lie in the host's memory."""
    offloads_parameters: bool = False
    """So do parameters and gradients that are not gathered."""
    by_rows: bool = False
    """A device gets whole rows of a parameter's first dimension, padded to as many on each; else elements."""
    tensor: int = 1
    """Devices over which decoder layers are cut first; `parameters` and the like count them in."""
    ranks: int = 1
    """Devices of the run: each copies this part of what a checkpoint holds before it writes it."""

    def held(self, units: Sequence[ParameterUnit], parts: int) -> int:
        """Return the elements that a device stores of units which are cut into `parts`, padding included."""
        return sum(
            unit.copies * shard_elements(p.tensor_shard(self.tensor), parts // self.tensor, by_rows=self.by_rows)
            for unit in units
            for p in unit.parameters
        )

    def computed_with(self, unit: ParameterUnit) -> int:
        """Return the elements of one such unit that a device computes with: all, or its part of layers that are cut."""
        return sum(math.prod(p.tensor_shard(self.tensor)) for p in unit.parameters)

    def gathered(self, unit: ParameterUnit) -> int:
        """Return the elements of one such unit when its parameters are gathered, padding included."""
        return self.gather_ranks * self.held([unit], self.parameters) // unit.copies

    @property
    def gather_ranks(self) -> int:
        """Devices that gather parameters from each other."""
        return self.parameters // self.tensor

    def padding_note(self, units: Sequence[ParameterUnit]) -> str | None:
        """Return in a line why more devices do not make state smaller, where padding is a tenth of it or more."""
        share = self.held(units, self.parameters) * self.parameters
        even = count_elements(units)
        if not self.by_rows or share < (1 + NOTED_PADDING) * even:
            return None
        padding = {
            (p.name, p.tensor_shard(self.tensor)[0]): unit.copies * (self.gathered(alone) - self.computed_with(alone))
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
    def whole(self) -> bool:
        """Whether a device has all parameters, so that a local engine can sample from them."""
        return self.parameters == 1
