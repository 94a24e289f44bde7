"""Argument checks of the public ops: each error names the argument, its value and the remedy."""

import math
import os
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

DEBUG_VARIABLE = "HWGRPO_DEBUG"
"""Set to 1, targets and temperatures on a device are checked too; without it, nothing waits for the device."""


class HeadNames(NamedTuple):
    """What a function calls its arguments, for its errors."""

    hidden: str = "hidden"
    weight: str = "weight"
    bias: str = "bias"
    targets: str = "targets"


def looks_at_values(device_type: str) -> bool:
    """Whether values on a device of this type are checked, which waits for it."""
    return device_type == "cpu" or (device_type != "meta" and os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"))


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless `logits` is [N,V] of a floating dtype."""
    check_tensor("logits", logits)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating [N,V], got {_what(logits)}; flatten the leading dimensions")
    if logits.shape[1] == 0:
        raise ValueError("logits has no vocabulary entries (V = 0)")


def check_tensor(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, names: HeadNames) -> None:
    """Raise ValueError unless hidden is [N,H], weight [V,H] and bias [V] or None, floating, on one device."""
    check_tensor(names.hidden, hidden)
    check_tensor(names.weight, weight)
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"{names.hidden} must be floating [N,H], got {_what(hidden)}; flatten batch and sequence to rows"
        )
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[0] == 0:
        raise ValueError(f"{names.weight} must be floating [V,H], got {_what(weight)}")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{names.weight} is [V,H] with H={weight.shape[1]}, but {names.hidden} has H={hidden.shape[1]}: "
            "pass the head of this model"
        )
    check_device(names.weight, weight, names.hidden, hidden)
    if bias is not None:
        check_tensor(names.bias, bias)
        if bias.shape != weight.shape[:1] or not bias.is_floating_point():
            raise ValueError(f"{names.bias} must be floating [V]=[{weight.shape[0]}], got {_what(bias)}")
        check_device(names.bias, bias, names.hidden, hidden)


def check_targets(targets: Tensor, source: Tensor, name: str, source_name: str) -> None:
    """Raise ValueError unless `targets` is [N] int32 or int64 on the device of `source`, which has N rows."""
    check_tensor(name, targets)
    rows = source.shape[0]
    if targets.dtype not in (torch.int64, torch.int32) or targets.shape != (rows,):
        raise ValueError(f"{name} must be int64 [N]=[{rows}], one per row of {source_name}, got {_what(targets)}")
    check_device(name, targets, source_name, source)


def check_target_range(targets: Tensor, vocab: int) -> None:
    """Raise ValueError for a target outside [0,V); elsewhere than on a CPU in debug mode only, since it waits."""
    if targets.numel() == 0 or not looks_at_values(targets.device.type):
        return
    low, high = (int(each) for each in torch.aminmax(targets))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise ValueError(f"targets holds {bad}, outside [0, {vocab}); leave ignored positions out, or mask their rows")


def check_map(
    temperature: float | Tensor, softcap: float | None, logit_scale: float, rows: int, source: Tensor
) -> None:
    """Raise ValueError for a temperature, softcap or logit scale that is not positive and finite."""
    if isinstance(temperature, Tensor):
        if temperature.shape != (rows,) or not temperature.is_floating_point():
            raise ValueError(f"temperature must be a number or floating [N]=[{rows}], got {_what(temperature)}")
        if temperature.requires_grad:
            raise ValueError("temperature requires grad, but no gradient is made for it; detach it")
        check_device("temperature", temperature, "the rows", source)
        looks = looks_at_values(temperature.device.type)
        if looks and not bool(((temperature > 0) & temperature.isfinite()).all()):
            raise ValueError("temperature has entries that are not positive and finite; score greedy rows with 1.0")
    else:
        _positive("temperature", temperature)
    if softcap is not None:
        _positive("softcap", softcap)
    _positive("logit_scale", logit_scale)


def check_chunk_rows(chunk_rows: int | None) -> int | None:
    """Return `chunk_rows`; raise ValueError unless it is None or a positive integer."""
    if chunk_rows is None:
        return None
    if not isinstance(chunk_rows, Integral) or isinstance(chunk_rows, bool) or chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows!r} must be a positive integer, or None for the default")
    return int(chunk_rows)


def check_logits_dtype(logits_dtype: torch.dtype | None, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the logits: the compute dtype, or fp32 when asked for.

    Raises:
        ValueError: any other dtype.
    """
    if logits_dtype is None or logits_dtype == compute_dtype:
        return compute_dtype
    if logits_dtype == torch.float32 and compute_dtype.itemsize == 2:
        return logits_dtype
    raise ValueError(
        f"logits_dtype={logits_dtype} does not fit operands in {compute_dtype}; use None, {compute_dtype}"
        + (" or torch.float32" if compute_dtype.itemsize == 2 else "")
    )


def _positive(name: str, value: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        hint = "; for greedy scoring use 1.0" if name == "temperature" else ""
        raise ValueError(f"{name}={value!r} must be positive and finite{hint}")


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, but {other_name} on {other.device}; move them to one device")


def _what(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
