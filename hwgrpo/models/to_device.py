"""Move a model to a device and keep its tied parameters tied."""

from __future__ import annotations

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model in place and keep tied parameters tied.

    `module.to` keeps them tied only if torch may change a parameter's device in place, which a device plug-in has to
    declare (`_has_compatible_shallow_copy_type`). Otherwise an LM head tied to its embedding would silently be trained
    as a separate parameter.

    Raises:
        RuntimeError: copies of one parameter differ, so it is unknown which one is right.
    """
    shared: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter, []).append(name)
    model.to(device)
    for first, *others in shared.values():
        parameter = model.get_parameter(first)
        untied = [name for name in others if model.get_parameter(name) is not parameter]
        for name in untied:
            if not torch.equal(model.get_parameter(name), parameter):
                raise RuntimeError(
                    f"moving the model to {device} gave the tied parameters {first} and {name} different values: "
                    f"the torch plug-in for {device.type!r} copies tensors wrongly; fix it, or set another backend"
                )
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)
        if untied:
            logger.warning(
                "moving the model to %s copied %s, which %s share: tied them again. "
                "The torch plug-in for %r does not declare that a parameter can change its device in place",
                device, first, " and ".join((first, *untied)), device.type,
            )  # fmt: skip
