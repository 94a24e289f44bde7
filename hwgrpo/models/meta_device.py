"""Models whose parameters are on torch's meta device, and the tensors that such a model still needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
META = torch.device("meta")


def copy_to_meta(module: M) -> M:
    """Copy a module with frozen parameters on the meta device and real buffers; tied parameters stay tied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=False)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape of a parameter, even if ZeRO-3 has partitioned it to an empty tensor."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def parameter_slots(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return each parameter of a module with its (owner, attribute) slots; tied parameters have several."""
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            slots.setdefault(parameter, []).append((owner, name))
    return slots


def non_parameter_tensors(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Copy a model's tensors that are not parameters to the CPU, by (module name, attribute).

    They are buffers, including those not in checkpoints (rotary frequencies), and plain tensor attributes.
    """
    return {(name, attribute): tensor.detach().cpu().clone() for name, attribute, tensor in non_parameters(model)}


def set_non_parameter_tensors(
    model: nn.Module, tensors: dict[tuple[str, str], torch.Tensor], device: torch.device
) -> None:
    """Set the tensors that `non_parameter_tensors` returned: buffers on a device, other tensors on the CPU.

    Raises:
        ValueError: the model has other tensors.
    """
    own = {(name, attribute) for name, attribute, _ in non_parameters(model)}
    if own != tensors.keys():
        raise ValueError(f"the two models have different tensors: {sorted(own ^ tensors.keys())[:3]}")
    for (name, attribute), tensor in tensors.items():
        module = model.get_submodule(name)
        if attribute in module._buffers:
            module._buffers[attribute] = tensor.to(device)
        else:
            setattr(module, attribute, tensor)


def non_parameters(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (module name, attribute, tensor) of a model's tensors that are not parameters."""
    for name, module in model.named_modules():
        for attribute, tensor in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                yield name, attribute, tensor
