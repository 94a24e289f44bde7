"""Adapters merged into the weights of a sampler's own copy: decoding then costs what the base model costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.local.adapted_linear import active_adapters, is_adapted, unsupported_reason

MERGED_IN_16_BITS = (
    "rollout.merge_adapters=true: the sampler's weights have 16 bits, and in bfloat16 a change below 1/512 of its "
    "weight is rounded away: early in training that is most of what adapters add"
)
"""Note about sampling with adapters merged into weights of 16 bits."""


def merged_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers whose adapters can be merged, by name; the others add theirs as in training.

    Raises:
        ConfigError: there are none.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_adapted(module) and type(module.base_layer) is nn.Linear and unsupported_reason(module) is None
    }
    if not layers:
        raise ConfigError(
            f"rollout.merge_adapters=true: {type(model).__name__} has no linear layer with plain LoRA to merge; leave "
            "rollout.merge_adapters out"
        )
    return layers


def unshared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a copy with merged adapters must not share with the model.

    Those of layers beside a merged one are among them: they may become one weight with it (`joined_weights`).

    Raises:
        ConfigError: as `merged_layers` does.
    """
    parents = dict.fromkeys(name.rpartition(".")[0] for name in merged_layers(model))
    return [parameter for parent in parents for parameter in model.get_submodule(parent).parameters()]


@torch.no_grad()
def merge(source: nn.Module, target: nn.Module) -> None:
    """Set the weights of a copy's adapted layers to base + scaling * up @ down, computed in fp32 and rounded once.

    Args:
        source: the model with base weights and adapters.
        target: its copy, whose weights of these layers are its own.
    """
    for name, layer in merged_layers(source).items():
        weight, active = layer.base_layer.weight.float(), active_adapters(layer)
        for adapter in active:
            down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
            weight = torch.addmm(weight, up, down, alpha=layer.scaling[adapter])
        copied: Any = target.get_submodule(name)
        copied.base_layer.weight.copy_(weight)
        copied.merged_adapters = active  # peft's forward, as the lean step, then leaves them out
