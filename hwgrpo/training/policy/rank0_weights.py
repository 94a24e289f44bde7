"""Weights read by rank 0 alone and broadcast unit by unit, so that no device holds the full model.

For a strategy that shards, rank 0 loads the model into host memory and the others make the same modules on the meta
device. The strategy materializes one unit after another (a decoder layer, or everything outside layers): its parameters
are broadcast one at a time, and sharded before the next unit is materialized.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from hwgrpo.models.meta_device import parameter_slots


class Rank0Weights:
    """The policy's initial weights; all methods are collectives, called in the same order.

    Args:
        model: on rank 0 with its weights in host memory, on the others on the meta device.
        device: this rank's device, which receives the weights.
        rank: this process's rank.
    """

    def __init__(self, model: nn.Module, device: torch.device, rank: int) -> None:
        self._host = {name: p.detach() for name, p in model.named_parameters()} if rank == 0 else None
        self._device = device

    def broadcast(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a full parameter on this rank's device; only the caller keeps it.

        Args:
            name: its name in the model.
            like: a tensor of its shape and dtype, may be on the meta device.
        """
        if self._host is None:
            weight = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        else:
            weight = self._host[name].to(self._device).contiguous()
        dist.broadcast(weight, src=0)
        return weight

    def replicate(self, model: nn.Module) -> None:
        """Materialize the quantized weights of a model with the same parameters: every rank holds all of them."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, slots in parameter_slots(model).items():
            if not parameter.is_floating_point():
                materialized = nn.Parameter(self.broadcast(names[parameter], parameter), requires_grad=False)
                for module, attribute in slots:
                    module.register_parameter(attribute, materialized)

    def materializer(self, model: nn.Module) -> Materializer:
        """Return the materializer of a model with the same parameters."""
        return Materializer(self, model)

    def broadcast_all(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield every parameter of a model with the same parameters, and its weight; for a quantized one itself."""
        for name, parameter in model.named_parameters():
            yield parameter, self.broadcast(name, parameter) if parameter.is_floating_point() else parameter


class Materializer:
    """Materializes a model unit by unit, but for its quantized weights; see `Rank0Weights.materializer`."""

    def __init__(self, weights: Rank0Weights, model: nn.Module) -> None:
        self._weights = weights
        self._missing = {p: name for name, p in model.named_parameters() if p.is_floating_point()}
        self._slots = parameter_slots(model)

    def materialize(self, unit: nn.Module) -> dict[str, nn.Parameter]:
        """Replace a unit's parameters by ones with weights on the device; return them by name.

        Parameters that an earlier call materialized, and those tied to them, are skipped.
        """
        materialized: dict[str, nn.Parameter] = {}
        for parameter in list(unit.parameters()):
            name = self._missing.pop(parameter, None)
            if name is not None:
                materialized[name] = nn.Parameter(self._weights.broadcast(name, parameter), parameter.requires_grad)
                for module, attribute in self._slots.pop(parameter):
                    module.register_parameter(attribute, materialized[name])
        return materialized
