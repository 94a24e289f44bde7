"""How a kernel of the host is registered under an operator of torch-npu."""

from collections import Counter
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""Operator -> how often its kernel ran."""

libraries = {space: torch.library.Library(space, "IMPL") for space in ("npu", "aten")}


def kernel(function: Callable[..., Any], space: str = "npu") -> Callable[..., Any]:
    """Register a kernel that takes and returns tensors of the host, under its own name."""
    name = function.__name__
    order = [each.name for each in getattr(getattr(torch.ops, space), name).default._schema.arguments]
    by_position = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in signature(function).parameters.values())

    def run(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        named |= dict(
            zip(order[by_position:], given[by_position:], strict=False)
        )  # torch gives what it can by position
        given = given[:by_position]
        with torch.no_grad():
            results = function(*map(_to_host, given), **{key: _to_host(value) for key, value in named.items()})
        if isinstance(results, tuple):
            return tuple(map(_to_device, results))
        return _to_device(results)

    libraries[space].impl(name, run, "PrivateUse1", allow_override=True)
    return function


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.device.type == "npu", "a fused operator was given a tensor of the host"
        return value.cpu()
    return value


def _to_device(value: Any) -> Any:
    return value.to("npu") if isinstance(value, Tensor) else value


def aten_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel of an operator for which torch-npu has a formula of its own, and the CPU has none."""
    return kernel(function, "aten")
