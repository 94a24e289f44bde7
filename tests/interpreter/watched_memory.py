"""Memory protection for Triton's CPU interpreter, which hands every address to C as it is.

A launch may touch the elements of the tensors it was given, neither the gap between two rows nor what lies behind the
last. An access elsewhere fails before it happens, also where its value would be masked out afterwards.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

REFUSED = "outside the tensors of its launch"


class Span(NamedTuple):
    """Where a tensor's rows lie, in bytes: the first at `begin`, one every `stride`, each `length` long."""

    begin: int
    end: int
    stride: int
    length: int

    def holds(self, addresses: np.ndarray) -> bool:
        """Whether every one of the addresses belongs to a row."""
        offsets = addresses.astype(np.int64) - self.begin
        inside = (offsets >= 0) & (offsets < self.end - self.begin)
        return bool((inside & (offsets % self.stride < self.length)).all())


def span(tensor: torch.Tensor) -> Span:
    """Return where a tensor lies: a matrix of dense rows row by row, any other from its first element to its last."""
    size = tensor.element_size()
    count = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    begin, whole = tensor.data_ptr(), max(1, count * size)
    if tensor.ndim == 2 and tensor.stride(1) == 1 and tensor.stride(0) > tensor.shape[1]:
        return Span(begin, begin + count * size, tensor.stride(0) * size, tensor.shape[1] * size)
    return Span(begin, begin + count * size, whole, whole)


def watch() -> None:
    """Watch every launch of this process, from now on."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    original_arguments = executor._init_args_hst
    original_load, original_store = builder.create_masked_load, builder.create_masked_store
    spans: list[Span] = []

    def arguments(self: Any, *given: Any) -> Any:
        positional, named = original_arguments(self, *given)
        spans[:] = map(span, _tensors([*positional, *named.values()]))
        return positional, named

    def check(what: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        if addresses.size:
            lowest = int(addresses.min())
            if not any(each.holds(addresses) for each in spans if each.begin <= lowest < each.end):
                raise IndexError(f"a kernel {what} {REFUSED}, from address {lowest} on: {spans}")

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check("reads", pointers, mask)
        return original_load(self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("writes", pointers, mask)
        return original_store(self, pointers, value, mask, *rest)

    executor._init_args_hst = arguments
    builder.create_masked_load, builder.create_masked_store = load, store


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (each for each in values if isinstance(each, torch.Tensor))
