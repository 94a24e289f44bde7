"""Weights that rank 0 alone has read, and how every rank gets its part without ever holding the whole model.

Where a strategy cuts the policy over ranks, rank 0 reads the model into its host's memory and the others make the same
modules without weights. The strategy then asks for one unit after another (a decoder layer, or what is outside of
layers): its parameters are broadcast one at a time, and cut before the next unit comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from hwgrpo.models.meta_device import parameter_slots


class Rank0Weights:
    """The policy's weights as they are before training; every rank calls every method, in the same order.

    Args:
        model: on rank 0 with its weights in the host's memory, elsewhere the same without.
        device: this rank's, where weights arrive.
        rank: this process's.
    """

    def __init__(self, model: nn.Module, device: torch.device, rank: int) -> None:
        self._host = {name: p.detach() for name, p in model.named_parameters()} if rank == 0 else None
        self._device = device

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a parameter whole on this rank's device; nobody else keeps it.

        Args:
            name: in the model.
            like: a tensor of its shape and dtype, which may be without memory.
        """
        if self._host is None:
            weight = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        else:
            weight = self._host[name].to(self._device).contiguous()
        dist.broadcast(weight, src=0)
        return weight

    def filling(self, model: nn.Module) -> Filling:
        """Return what fills a model like the one this was made from, unit by unit."""
        return Filling(self, model)

    def named(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield every parameter of a model like the one this was made from, with its weight."""
        for name, parameter in model.named_parameters():
            yield parameter, self.whole(name, parameter)


class Filling:
    """See `Rank0Weights.filling`."""

    def __init__(self, weights: Rank0Weights, model: nn.Module) -> None:
        self._weights = weights
        self._missing = {parameter: name for name, parameter in model.named_parameters()}
        self._places = parameter_slots(model)

    def fill(self, unit: nn.Module) -> dict[str, nn.Parameter]:
        """Put new parameters with their weights, on the device, in the place of those of a unit; return them by name.

        What an earlier call has filled is left as it is, and what shares a parameter with it.
        """
        done: dict[str, nn.Parameter] = {}
        for parameter in list(unit.parameters()):
            name = self._missing.pop(parameter, None)
            if name is not None:
                done[name] = nn.Parameter(self._weights.whole(name, parameter), parameter.requires_grad)
                for module, attribute in self._places.pop(parameter):
                    module.register_parameter(attribute, done[name])
        return done
