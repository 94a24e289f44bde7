"""Argument checks of the public ops: each error names the argument, its value and the remedy."""

import math
import os
from collections.abc import Mapping
from itertools import pairwise
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

_SCOPES = ("token", "sequence", "batch")

DEBUG_VARIABLE = "HWGRPO_DEBUG"
"""Environment variable: "1" also checks targets and temperatures on a device, which synchronizes with it."""


class HeadNames(NamedTuple):
    """Argument names of a public op, for its errors."""

    hidden: str = "hidden"
    weight: str = "weight"
    bias: str = "bias"
    targets: str = "targets"


def checks_values(device_type: str) -> bool:
    """Return whether values on a device of this type are checked, which synchronizes with it."""
    return device_type == "cpu" or (device_type != "meta" and os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"))


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless `logits` is [N,V] of a floating dtype."""
    check_tensor("logits", logits)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating [N,V], got {_describe(logits)}; flatten the leading dimensions")
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
            f"{names.hidden} must be floating [N,H], got {_describe(hidden)}; flatten batch and sequence to rows"
        )
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[0] == 0:
        raise ValueError(f"{names.weight} must be floating [V,H], got {_describe(weight)}")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{names.weight} is [V,H] with H={weight.shape[1]}, but {names.hidden} has H={hidden.shape[1]}: "
            "pass the head of this model"
        )
    check_device(names.weight, weight, names.hidden, hidden)
    if bias is not None:
        check_tensor(names.bias, bias)
        if bias.shape != weight.shape[:1] or not bias.is_floating_point():
            raise ValueError(f"{names.bias} must be floating [V]=[{weight.shape[0]}], got {_describe(bias)}")
        check_device(names.bias, bias, names.hidden, hidden)


def check_operand(operand: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a cast of the head's weight, made before, has its shape and device, and the dtype."""
    check_tensor("weight_operand_VH", operand)
    if operand.shape != weight.shape or operand.dtype != dtype or operand.device != weight.device:
        raise ValueError(
            f"weight_operand_VH must be {_describe(weight.detach().to('meta', dtype))} on {weight.device}, got "
            f"{_describe(operand)} on {operand.device}: make it with weight_operand, for the same dtypes"
        )


def check_targets(targets: Tensor, source: Tensor, name: str, source_name: str) -> None:
    """Raise ValueError unless `targets` is [N] int32 or int64 on the device of `source`, which has N rows."""
    check_tensor(name, targets)
    rows = source.shape[0]
    if targets.dtype not in (torch.int64, torch.int32) or targets.shape != (rows,):
        raise ValueError(f"{name} must be int64 [N]=[{rows}], one per row of {source_name}, got {_describe(targets)}")
    check_device(name, targets, source_name, source)


def check_target_range(targets: Tensor, vocab: int) -> None:
    """Raise ValueError for a target outside [0,V); on other devices than the CPU in debug mode only."""
    if targets.numel() == 0 or not checks_values(targets.device.type):
        return
    low, high = (int(each) for each in torch.aminmax(targets))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise ValueError(f"targets contains {bad}, outside [0, {vocab}); omit ignored positions, or mask their rows")


def check_map(
    temperature: float | Tensor, softcap: float | None, logit_scale: float, rows: int, source: Tensor
) -> None:
    """Raise ValueError for a temperature, softcap or logit scale that is not positive and finite."""
    if isinstance(temperature, Tensor):
        if temperature.shape != (rows,) or not temperature.is_floating_point():
            raise ValueError(f"temperature must be a number or floating [N]=[{rows}], got {_describe(temperature)}")
        if temperature.requires_grad:
            raise ValueError("temperature requires grad, but gets no gradient; detach it")
        check_device("temperature", temperature, "the rows", source)
        checked = checks_values(temperature.device.type)
        if checked and not bool(((temperature > 0) & temperature.isfinite()).all()):
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
    """Return the dtype of the logits: the compute dtype, or fp32 if requested.

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


def check_rows(
    hidden_NH: Tensor,
    loss_fn: object,
    rows: Mapping[str, Tensor],
    row_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scope: str,
) -> list[int] | None:
    """Return cu_seqlens as a list, or None under scope "token".

    Raises:
        ValueError: loss_fn, rows, row_mask, cu_seqlens or scope does not fit the N rows of hidden_NH.
    """
    n = hidden_NH.shape[0]
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function of (stats, rows), got {type(loss_fn).__name__}")
    if scope not in _SCOPES:
        raise ValueError(f"scope={scope!r} is not known; choose one of: token, sequence, batch")
    if not isinstance(rows, Mapping):
        raise ValueError(f"rows must map names to tensors of N rows ({{}} for none), got {type(rows).__name__}")
    for name, each in rows.items():
        if not isinstance(each, Tensor) or each.dim() == 0 or each.shape[0] != n:
            raise ValueError(f"rows[{name!r}] must be a tensor of N={n} rows, got {shape_of(each)}")
        if each.requires_grad:
            raise ValueError(f"rows[{name!r}] requires grad, but gets no gradient; detach it")
        check_device(f"rows[{name!r}]", each, "hidden_NH", hidden_NH)
    if row_mask is not None:
        check_tensor("row_mask", row_mask)
        if row_mask.dtype != torch.bool or row_mask.shape != (n,):
            raise ValueError(f"row_mask must be bool [N]=[{n}], got {row_mask.dtype} {shape_of(row_mask)}")
        check_device("row_mask", row_mask, "hidden_NH", hidden_NH)
    if cu_seqlens is None:
        if scope == "sequence":
            raise ValueError("scope='sequence' needs cu_seqlens, the [S+1] row offsets of the sequences")
        return None
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integer [S+1], got {cu_seqlens.dtype} {shape_of(cu_seqlens)}")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != n or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to N={n} (row offsets of S sequences), got {bounds[:8]}...")
    return None if scope == "token" else bounds


def _positive(name: str, value: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        hint = "; for greedy scoring use 1.0" if name == "temperature" else ""
        raise ValueError(f"{name}={value!r} must be positive and finite{hint}")


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, but {other_name} on {other.device}; move them to one device")


def shape_of(value: object) -> str:
    """Return the shape of a tensor, or the type of another value, for an error message."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
