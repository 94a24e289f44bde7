"""A model's decoder layers, and running a model on a device one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hwgrpo.models.meta_device import parameter_slots


def decoder_layers(base: nn.Module) -> list[nn.Module]:
    """Return the modules of a transformers model to gather one at a time, in forward order.

    They are the innermost modules of the model's `_no_split_modules`.
    """
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [m for m in base.modules() if type(m).__name__ in names and next(m.parameters(), None) is not None]
    return [layer for layer in layers if not any(inner in layers for inner in list(layer.modules())[1:])]


@contextmanager
def layerwise_on_device(base: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a model in host memory on a device that may be too small for it.

    Within the block, parameters outside the decoder layers and all vectors (norms, biases) are on the device; a layer's
    matrices are copied to it for each call of their module. Afterwards everything is on the CPU again.

    Args:
        base: a transformers model on the CPU.
        device: compute device; the CPU: nothing is done.
    """
    if device.type == "cpu":
        yield
        return
    layers = decoder_layers(base)
    matrices = {p for layer in layers for p in layer.parameters() if p.ndim > 1}
    moved = [
        (slots, parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
        for parameter, slots in parameter_slots(base).items()
        if parameter not in matrices
    ]
    buffers = [(m, name, b) for m in base.modules() for name, b in m.named_buffers(recurse=False)]
    hooks = []
    try:
        for slots, _, on_device in moved:
            set_parameter(slots, on_device)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(device)
        for module in {module for layer in layers for module in layer.modules()}:
            loan = _ParameterLoan(device)
            hooks.append(module.register_forward_pre_hook(loan.begin, prepend=True))
            hooks.append(module.register_forward_hook(loan.end, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for slots, on_host, _ in moved:
            set_parameter(slots, on_host)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


class _ParameterLoan:
    """Puts a module's host parameters on a device while its forward runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: list[tuple[list[tuple[nn.Module, str]], nn.Parameter]] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        for parameter, slots in parameter_slots(module).items():
            if parameter.device.type == "cpu":
                # frozen: autocast would cache a cast copy of each until the block ends
                set_parameter(slots, nn.Parameter(parameter.detach().to(self._device), requires_grad=False))
                self._moved.append((slots, parameter))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._moved:
            set_parameter(*self._moved.pop())


def set_parameter(slots: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in slots:
        module._parameters[name] = parameter
