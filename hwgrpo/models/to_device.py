"""Putting a model on its device with the parameters that it shares still shared."""

from __future__ import annotations

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


def move_to(model: nn.Module, device: torch.device) -> None:
    """Move a model in place; parameters that were one object before are one object after.

    `module.to` keeps them so only where torch may change the device of a parameter in place, which a device plug-in has
    to tell it (`_has_compatible_shallow_copy_type`). Without that, an LM head tied to its embedding would be trained
    apart from it, and nothing would say so.

    Raises:
        RuntimeError: copies of one parameter came out different, so there is no telling which one is right.
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
                    f"moving the model to {device} made different copies of one parameter, {first} and {name}: "
                    f"the torch plug-in of {device.type!r} copies tensors wrongly; repair it, or choose another backend"
                )
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)
        if untied:
            logger.warning(
                "moving the model to %s made copies of %s, which %s share: they are one again. "
                "The torch plug-in of %r does not say that parameters can change their device in place",
                device, first, " and ".join((first, *untied)), device.type,
            )  # fmt: skip
