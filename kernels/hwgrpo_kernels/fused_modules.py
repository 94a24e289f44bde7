"""Fused modules by device type, for callers that name no device; npu_modules/ holds those of Ascend."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

ATTENTION_MODULE = "attention"
"""The fused module that stands for an attention implementation."""


def attention(device_type: str) -> str | None:
    """Return the name, for transformers, of the attention that a device's fused modules bring, or None."""
    family = _family(device_type)
    return None if family is None else family.attention.IMPLEMENTATION


def modules(device_type: str) -> tuple[str, ...]:
    """Return the names of the fused modules that a device has."""
    family = _family(device_type)
    return () if family is None else tuple(family.MODULES)


def reason_against(device_type: str, module: str) -> str | None:
    """Return why a fused module is not to be had on a device in this process, or None."""
    family = _family(device_type)
    if family is None:
        return f"{device_type} has no fused modules"
    if module not in family.MODULES:
        return f"{device_type} has no fused module of that name, but {', '.join(family.MODULES)}"
    return family.reason_against(module)


def apply(model: nn.Module, modules: Sequence[str], dtype: torch.dtype | None = None) -> Any:
    """Put the fused modules of its device into a model; see `npu_modules.apply`.

    Raises:
        ValueError: the model is on a device that has none.
    """
    device_type = next(model.parameters()).device.type
    family = _family(device_type)
    if family is None:
        raise ValueError(f"modules={list(modules)}: the model is on {device_type}, which has no fused modules")
    return family.apply(model, modules, dtype)


def adopt(model: nn.Module, taken: Mapping[str, Sequence[str]], device_type: str) -> None:
    """Put fused modules where they were taken in another copy of a model; see `npu_modules.adopt`.

    Args:
        model: may be without weights.
        taken: by fused module, the names of the sub-modules.
        device_type: where the model will be.
    """
    family = _family(device_type)
    assert family is not None, f"nothing was taken on {device_type}"
    family.adopt(model, taken)


def is_fused(module: nn.Module) -> bool:
    """Whether a module's forward is a fused one, which computes what the module's own does."""
    from . import npu_modules

    return npu_modules.is_fused(module)


def _family(device_type: str) -> Any:
    if device_type != "npu":
        return None
    from . import npu_modules

    return npu_modules
