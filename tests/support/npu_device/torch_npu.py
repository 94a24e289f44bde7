"""What stands where torch-npu would: `import torch_npu` gives torch a device named npu, and this as `torch.npu`.

It has the names that this project and torch itself use of torch-npu, and no others: a call of anything else fails as
loudly as it would be unproven.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch_npu import _device

NAME = "Ascend910B3"

torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")


def _index(device: Any = None) -> int:
    """Return the index that a device, an index or None means."""
    if isinstance(device, int):
        index = device
    else:
        index = None if device is None else torch.device(device).index
    return _device.current_device() if index is None else index


def _api(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(npu, function.__name__, function)
    return function


npu.device_count = _device.device_count
npu.current_device = _device.current_device
npu._is_in_bad_fork = lambda: False  # asked by torch.manual_seed
npu.Stream = lambda device=None, priority=0: torch.Stream(device=f"npu:{_index(device)}", priority=priority)
npu.Event = torch.Event  # DeepSpeed names it in a class body, and accelerate imports DeepSpeed where it is installed


@_api
def is_available() -> bool:
    return _device.device_count() > 0


@_api
def is_initialized() -> bool:
    return True


@_api
def set_device(device: Any) -> None:
    _device.set_device(_index(device))


@_api
def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


@_api
def get_device_name(device: Any = None) -> str:
    _known(device)
    return NAME


@_api
def is_bf16_supported() -> bool:
    return True


@_api
def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


@_api
def empty_cache() -> None:
    torch.accelerator.empty_cache()


@_api
def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


@_api
def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


@_api
def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


@_api
def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


@_api
def manual_seed_all(seed: int) -> None:
    for index in range(_device.device_count()):
        _device.default_generator(index).manual_seed(seed)


@_api
def get_rng_state(device: Any = None) -> torch.Tensor:
    return _device.default_generator(_index(device)).get_state()


@_api
def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _device.default_generator(_index(device)).set_state(state)


@_api
@contextlib.contextmanager
def stream(stream: torch.Stream) -> Iterator[None]:
    with stream:
        yield


@_api
@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = _device.current_device()
    _device.set_device(_index(device))
    try:
        yield
    finally:
        _device.set_device(before)


def _known(device: Any) -> None:
    index = _index(device)
    if not 0 <= index < _device.device_count():
        raise RuntimeError(f"invalid npu device {index}: there are {_device.device_count()}")


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("hccl", store), rank, size, timeout)
    return _device.hccl(gloo)


torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("hccl", _hccl, devices=["npu"])


def _autoload() -> None:
    """Called by `import torch`, which imports the modules of the entry-point group torch.backends."""


def __getattr__(name: str) -> Any:
    if not name.startswith("npu_"):  # the fused operators, which transformers imports without calling them
        raise AttributeError(f"the simulated torch_npu has no {name}")

    def absent(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the simulated torch_npu has no {name}")

    return absent
