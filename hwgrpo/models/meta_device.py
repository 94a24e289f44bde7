"""Models without memory for their weights: the same modules, their parameters on torch's meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
META = torch.device("meta")


def hollow_copy(module: M) -> M:
    """Return a copy of a module with buffers of its own and frozen parameters that have no memory. Ties stay ties."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=False)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, though ZeRO-3 may have cut it and left nothing in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def places(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return every parameter below a module with all (module, attribute) that hold it: tied ones have several."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((owner, name))
    return found


def beside_parameters(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Return copies on the CPU of what tensors a model has beside parameters, by (module's name, attribute).

    They are buffers, those that no checkpoint holds among them (rotary frequencies), and tensors kept as they are.
    """
    return {(name, attribute): tensor.detach().cpu().clone() for name, attribute, tensor in _beside(model)}


def set_beside_parameters(model: nn.Module, tensors: dict[tuple[str, str], torch.Tensor], device: torch.device) -> None:
    """Give a model what `beside_parameters` returned of its like: buffers on a device, other tensors on the CPU.

    Raises:
        ValueError: the model has others.
    """
    own = {(name, attribute) for name, attribute, _ in _beside(model)}
    if own != tensors.keys():
        raise ValueError(f"a model of the same kind has other tensors: {sorted(own ^ tensors.keys())[:3]}")
    for (name, attribute), tensor in tensors.items():
        module = model.get_submodule(name)
        if attribute in module._buffers:
            module._buffers[attribute] = tensor.to(device)
        else:
            setattr(module, attribute, tensor)


def _beside(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, module in model.named_modules():
        for attribute, tensor in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                yield name, attribute, tensor
