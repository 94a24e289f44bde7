"""Launches of the Triton kernels recorded instead of run, with what each reads, writes and multiplies."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
"""Argument -> value of a launch."""


class KernelWork(NamedTuple):
    """What one launch does."""

    bytes: int
    """Read and written."""
    flops: int = 0
    """Of matrix products."""


class KernelLaunch(NamedTuple):
    """A launch that was not run."""

    name: str
    work: KernelWork


_declared: dict[str, Callable[[Arguments], KernelWork]] = {}


def declare_work(kernel: str, work: Callable[[Arguments], KernelWork]) -> None:
    """Declare the work of a kernel, beside it; unnecessary for one that reads or writes each tensor once.

    Args:
        kernel: name of its function.
        work: called with the arguments of a launch.
    """
    assert kernel not in _declared, f"the work of {kernel} is declared twice"
    _declared[kernel] = work


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: expanded dimensions count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else min(size, 1)
    return count


@contextmanager
def recorded_launches(record: Callable[[KernelLaunch], None], *, arch: str, processors: int) -> Iterator[None]:
    """Report the launches of Triton kernels instead of running them. It needs triton, and no GPU.

    Args:
        record: called for every launch.
        arch: the chip's, for the tiles.
        processors: its number of processors.
    """
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    from . import head, rows_triton

    target = SimpleNamespace(arch=int(arch.removeprefix("sm_")) if arch.startswith("sm_") else arch)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": processors}),
    )

    def launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip(kernel.arg_names, values)) | named
        name = kernel.fn.__name__
        tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
        work = _declared[name](arguments) if name in _declared else KernelWork(sum(map(tensor_bytes, tensors)))
        record(KernelLaunch(name, work))

    with ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", launch),
            (rows_triton, "_driver", lambda: driver),
            (head, "adds_into_fp32", lambda device: True),  # asks the device
            (torch.accelerator, "device_index", lambda index: nullcontext()),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
