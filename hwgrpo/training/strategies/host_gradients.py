"""Gradients that are summed in host memory: a device has those of a parameter only until they are computed.

A backward pass adds to what is on the device: a parameter's sum is copied there, a chunk at a time, and back. The sums
are therefore those of accumulation on the device, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hwgrpo_backends.device import runtime
from torch import Tensor
from torch.distributed.tensor import DTensor

from hwgrpo.training.strategies import pinned_memory

CHUNK = 2**23
"""Elements of a parameter that are copied, or stepped, at a time."""


class HostGradients:
    """The gradients of this rank's elements of parameters.

    Args:
        parameters: trainable parameters, whose `grad` stays None from now on.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._memory: dict[Tensor, Tensor] = {}
        self._summed: set[Tensor] = set()
        self._copying = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.add)

    @torch.no_grad()
    def add(self, parameter: Tensor) -> None:
        """Add a parameter's `grad` to its sum, and free it."""
        if not self._memory:
            self._memory = dict(zip(self._parameters, _host_memory(self._parameters), strict=True))
        gradient, held = local(parameter.grad).view(-1), self._memory[parameter]
        for start, stop in chunks(len(gradient)):
            part, there = gradient[start:stop], held[start:stop]
            if parameter in self._summed:
                part.add_(there.to(part.device, non_blocking=True))
            there.copy_(part, non_blocking=True)
        parameter.grad = None
        self._summed.add(parameter)
        self._copying = True

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient in host memory, to be read or written; None: it has none."""
        if self._copying:
            device = local(parameter).device
            runtime(device).synchronize(device)
            self._copying = False
        return self._memory[parameter].view(local(parameter).shape) if parameter in self._summed else None

    def discard(self) -> None:
        """Begin new sums."""
        self._summed.clear()


def _host_memory(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return fp32 memory [count] for this rank's elements of each parameter, pinned if a device copies from it."""
    parts = [(local(parameter).numel(), torch.float32) for parameter in parameters]
    if local(parameters[0]).device.type == "cpu":
        return [torch.empty(count, dtype=dtype) for count, dtype in parts]
    return pinned_memory.empty(parts)


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's elements."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """Yield the first element, and the one after the last, of each chunk."""
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)
