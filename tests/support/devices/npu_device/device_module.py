"""What `torch.npu` is to torch-npu, for any simulated device: a module with the runtime calls that trainers make.

It has the names that this project and torch itself use, and no others: a call of anything else fails as loudly as it
would be unproven. The compiled half is imported only when torch has been told what the device is called.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def install(package: str, kind: str, chip: str, comm: str, visible: str) -> tuple[types.ModuleType, Any]:
    """Give torch a device.

    Args:
        package: the Python package of the plug-in, which has the compiled half beside it.
        kind: what the device is called ("npu").
        chip: what its vendor calls one of them.
        comm: the torch.distributed backend of its collectives ("hccl"), carried by gloo.
        visible: the variable that lists the devices of the host which a process may use.

    Returns:
        `torch.KIND`, and the compiled half.
    """
    torch.utils.rename_privateuse1_backend(kind)
    compiled = importlib.import_module(f"{package}._device")
    if visible in os.environ:
        compiled.leave_devices(_listed(os.environ[visible], compiled.device_count()))
    module = _runtime(kind, chip, compiled)
    torch._register_device_module(kind, module)
    sys.modules[f"torch.{kind}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()

    def collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(comm, store), rank, size, timeout)
        return compiled.collectives(gloo, comm)

    dist.Backend.register_backend(comm, collectives, devices=[kind])
    return module, compiled


def _listed(value: str, count: int) -> int:
    """Return how many of `count` devices a list of indices names; what is no device's index ends the list."""
    there = {str(index) for index in range(count)}
    return sum(1 for _ in itertools.takewhile(there.__contains__, map(str.strip, value.split(","))))


def _runtime(kind: str, chip: str, compiled: Any) -> types.ModuleType:
    runtime = types.ModuleType(f"torch.{kind}")

    def index_of(device: Any = None) -> int:
        """Return the index that a device, an index or None means."""
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return compiled.current_device() if index is None else index

    def api(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(runtime, function.__name__, function)
        return function

    runtime.device_count = compiled.device_count
    runtime.current_device = compiled.current_device
    runtime._is_in_bad_fork = lambda: False  # asked by torch.manual_seed
    runtime.Stream = lambda device=None, priority=0: torch.Stream(
        device=f"{kind}:{index_of(device)}", priority=priority
    )
    runtime.Event = (
        torch.Event
    )  # DeepSpeed names it in a class body; accelerate imports DeepSpeed where it is installed

    @api
    def is_available() -> bool:
        return compiled.device_count() > 0

    @api
    def is_initialized() -> bool:
        return True

    @api
    def set_device(device: Any) -> None:
        compiled.set_device(index_of(device))

    @api
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(index_of(device))

    @api
    def get_device_name(device: Any = None) -> str:
        index = index_of(device)
        if not 0 <= index < compiled.device_count():
            raise RuntimeError(f"invalid {kind} device {index}: there are {compiled.device_count()}")
        return chip

    @api
    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])

    @api
    def is_bf16_supported() -> bool:
        return True

    @api
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @api
    def empty_cache() -> None:
        torch.accelerator.empty_cache()

    @api
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(index_of(device))

    @api
    def memory_allocated(device: Any = None) -> int:
        return torch.accelerator.memory_allocated(index_of(device))

    @api
    def max_memory_allocated(device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated(index_of(device))

    @api
    def reset_peak_memory_stats(device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(index_of(device))

    @api
    def FloatTensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=f"{kind}:{index_of()}")

    @api
    def memory_stats(device: Any = None) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(index_of(device)))

    @api
    def manual_seed_all(seed: int) -> None:
        for index in range(compiled.device_count()):
            compiled.default_generator(index).manual_seed(seed)

    @api
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return compiled.default_generator(index_of(device)).get_state()

    @api
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        compiled.default_generator(index_of(device)).set_state(state)

    @api
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(index_of(device))

    @api
    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        with stream:
            yield

    @api
    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = compiled.current_device()
        compiled.set_device(index_of(device))
        try:
            yield
        finally:
            compiled.set_device(before)

    return runtime
