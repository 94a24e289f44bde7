"""Fused modules by device type, for device-independent callers; module_replacement/ inserts them into a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

ATTENTION_MODULE = "attention"
"""Name of the fused module that is an attention implementation."""


def attention(device_type: str) -> str | None:
    """Return transformers' name for a device's fused attention, or None."""
    family = _family(device_type) if device_type == "npu" else None
    return None if family is None else family.attention.IMPLEMENTATION


def modules(device_type: str) -> tuple[str, ...]:
    """Return the names of the fused modules that a device has."""
    family = _family(device_type)
    if family is None:
        return ()
    return tuple(each for each in family.MODULES if each != ATTENTION_MODULE or attention(device_type))


def reason_against(device_type: str, module: str) -> str | None:
    """Return why a fused module is unavailable on a device in this process, or None."""
    family = _family(device_type)
    if family is None:
        return f"{device_type} has no fused modules"
    if module not in modules(device_type):
        return f"{device_type} has no fused module of that name, but {', '.join(modules(device_type))}"
    return family.reason_against(module, device_type)


def apply(model: nn.Module, modules: Sequence[str], dtype: torch.dtype | None = None) -> Any:
    """Replace a model's modules by its device's fused ones; see `module_replacement.apply`.

    Raises:
        ValueError: the model is on a device that has none.
    """
    device_type = next(model.parameters()).device.type
    family = _family(device_type)
    if family is None:
        raise ValueError(f"modules={list(modules)}: the model is on {device_type}, which has no fused modules")
    return family.apply(model, modules, dtype)


def copy_to(model: nn.Module, record: Mapping[str, Mapping[str, Sequence[str]]], device_type: str) -> None:
    """Replace the same modules in another copy of a model; see `module_replacement.copy_to`.

    Args:
        model: may be on the meta device.
        record: `as_json()` of the copy that was self-tested.
        device_type: torch device type that the model will run on.
    """
    family = _family(device_type)
    assert family is not None, f"{device_type} has no fused modules to copy"
    family.copy_to(model, record["replaced"], record["in_compute_dtype"])


def is_fused(module: nn.Module) -> bool:
    """Return whether a module's forward is a fused one."""
    from . import module_replacement

    return module_replacement.is_fused(module)


def _family(device_type: str) -> Any:
    if device_type not in ("npu", "cuda"):  # hw: torch-npu's ops, and Triton's kernels
        return None
    from . import module_replacement

    return module_replacement
