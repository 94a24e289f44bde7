"""A model's decoder layers, and a model whose layers come to a device one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hwgrpo.models.meta_device import places


def decoder_layers(base: nn.Module) -> list[nn.Module]:
    """Return the modules of a transformers model that are to be whole one at a time, in the order of the forward.

    They are those that the model itself says must stay in one piece (`_no_split_modules`), the innermost of each.
    """
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [m for m in base.modules() if type(m).__name__ in names and next(m.parameters(), None) is not None]
    return [layer for layer in layers if not any(inner in layers for inner in list(layer.modules())[1:])]


@contextmanager
def layers_in_turn(base: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model that is in the host's memory compute on a device which need not hold it.

    Within the block the device has what is outside of the decoder layers and all vectors (norms, biases); a layer's
    matrices are there while one of its modules is called. Afterwards everything is where it was.

    Args:
        base: a transformers model on the CPU.
        device: where it computes; nothing is done where that is the CPU.
    """
    if device.type == "cpu":
        yield
        return
    layers = decoder_layers(base)
    matrices = {p for layer in layers for p in layer.parameters() if p.ndim > 1}
    held = [
        (place, parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
        for parameter, place in places(base).items()
        if parameter not in matrices
    ]
    buffers = [(m, name, b) for m in base.modules() for name, b in m.named_buffers(recurse=False)]
    hooks = []
    try:
        for place, _, there in held:
            _put(place, there)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(device)
        for module in {module for layer in layers for module in layer.modules()}:
            visit = _Visit(device)
            hooks.append(module.register_forward_pre_hook(visit.begin, prepend=True))
            hooks.append(module.register_forward_hook(visit.end, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for place, here, _ in held:
            _put(place, here)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


class _Visit:
    """Brings to a device what a module has on the host for as long as its forward runs, and whoever is within it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._brought: list[tuple[list[tuple[nn.Module, str]], nn.Parameter]] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        for parameter, place in places(module).items():
            if parameter.device.type == "cpu":
                # frozen: autocast would keep a cast copy of each until the whole trial is over
                _put(place, nn.Parameter(parameter.detach().to(self._device), requires_grad=False))
                self._brought.append((place, parameter))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._brought:
            _put(*self._brought.pop())


def _put(place: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in place:
        module._parameters[name] = parameter
