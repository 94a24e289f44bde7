"""`Device`: the runtime calls of a trainer, the same on every backend. Importing this module imports torch.

All calls go to `torch.get_device_module`: these modules have the same functions for every device, whereas
`torch.accelerator` raises on hosts without one and its memory calls fail on torch-npu older than 2.13.
"""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo_backends import cpu
from hwgrpo_backends.backend import Backend, BackendError
from hwgrpo_backends.graphs import Recorder
from hwgrpo_backends.peaks import Peak, peak


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes; None for a device without its own memory."""

    free: int | None = None
    total: int | None = None
    allocated: int | None = None
    peak: int | None = None
    """Highest `allocated` since the start or the last `reset_peak`."""


class _HostModule:
    """The functions of an accelerator's module for the host processor, most of which torch.cpu lacks."""

    stream = staticmethod(torch.cpu.stream)
    Stream = torch.cpu.Stream

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None: ...

    def synchronize(self, device: torch.device) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, device: torch.device) -> None: ...

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: torch.device) -> str:
        return platform.processor() or platform.machine()


def runtime(device: torch.device) -> Any:
    """Return the runtime calls of a torch device's family, which torch names alike for all of them."""
    return _HostModule() if device.type == "cpu" else torch.get_device_module(device)


def fuses_adamw(device_type: str) -> bool:
    """Return whether torch's AdamW has one pass over the parameters there, and does not take it by default.

    Its default is a loop over tensors on a CPU, and many passes with temporaries on NVIDIA and AMD GPUs.
    """
    return device_type in ("cpu", "cuda")


def has_flash_operator(device_type: str) -> bool:
    """Return whether torch's own flash attention, which reads lengths, is built for these devices (NVIDIA and AMD)."""
    return device_type == "cuda"


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on a device, made while the host goes on; on the host the tensor itself.

    From memory that is not pinned, the host would first wait for all that the device has to do.
    """
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # an expanded one cannot be written


class Device:
    """The device of this process.

    Args:
        backend: the family.
        local_rank: index among its visible devices; all processes share the host processor.

    Raises:
        BackendError: there are fewer devices.
    """

    def __init__(self, backend: Backend, local_rank: int = 0) -> None:
        self.backend = backend
        self.index = 0 if backend.is_host else local_rank
        self.oom_error: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)
        """Types for an `except`; `is_oom` also recognizes plain RuntimeErrors."""
        if backend.plugin:
            importlib.import_module(backend.plugin)
        self._module: Any = runtime(torch.device(backend.device_type))
        if backend.is_host:
            self.torch_device = torch.device(backend.device_type)
            return
        count = self.count
        if not 0 <= local_rank < count:
            raise BackendError(
                f"local rank {local_rank} has no {backend.name} device: this process sees {count}. "
                f"Start at most {count} processes on this host, or check {backend.visible_env}"
            )
        self.torch_device = torch.device(backend.device_type, local_rank)

    @property
    def count(self) -> int:
        """Devices of its family that this process sees; 1 for the host processor."""
        return self._module.device_count()

    @property
    def comm_backend(self) -> str:
        """The torch.distributed backend for this device's collectives."""
        return self.backend.comm

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        return self._module.get_device_name(self.torch_device)

    @property
    def arch(self) -> str:
        """The chip's architecture ("sm_90", "gfx942", "ascend910b1")."""
        return self.backend.arch(self.index)

    @property
    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes this device computes in, the default one first."""
        return self.backend.compute_dtypes(self.index)

    def peak(self, dtype: torch.dtype) -> Peak | None:
        """Return this device's peak rate in `dtype`; None: unknown."""
        # below "highest" matmul precision, torch rounds the operands of fp32 products
        rounds = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return peak(self.backend.chips, self.arch, self.name, "tf32" if rounds else dtype)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of device graphs; None: unsupported."""
        return self.backend.record

    def set_device(self) -> None:
        """Make this device the current one of the process."""
        if self.backend.prepare is not None:
            self.backend.prepare()
        self._module.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until everything submitted to this device is done."""
        self._module.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        """Release the allocator's cached memory to the device."""
        self._module.empty_cache()

    @property
    def measures_memory(self) -> bool:
        """Whether the device has its own memory: host memory belongs to all processes."""
        return not self.backend.is_host

    def memory(self) -> Memory:
        """Return the device's memory in bytes, all None if it is not measured."""
        if not self.measures_memory:
            return Memory()
        free, total = self._module.mem_get_info(self.torch_device)
        allocated = self._module.memory_allocated(self.torch_device)
        return Memory(free, total, allocated, self._module.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """Reset `Memory.peak`."""
        self._module.reset_peak_memory_stats(self.torch_device)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators, the host's and the device's."""
        torch.manual_seed(seed)

    def set_deterministic(self, on: bool = True) -> None:
        """Make torch use deterministic kernels, and raise for ops without one.

        The variables of `Backend.env_deterministic` must also be set before torch is imported.
        """
        torch.use_deterministic_algorithms(on)

    def rng_state(self) -> torch.Tensor:
        """Return the state of this device's generator as a uint8 tensor on the host.

        An accelerator's generator is not the host's: a checkpoint has `torch.get_rng_state()` as well.
        """
        return self._module.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a generator state from `rng_state`."""
        self._module.set_rng_state(state, self.torch_device)

    def new_stream(self) -> Any:
        """Return a new stream of this device."""
        return self._module.Stream() if self.backend.is_host else self._module.Stream(device=self.torch_device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is submitted to `stream`."""
        return self._module.stream(stream)

    @contextmanager
    def trace(self, name: str) -> Iterator[None]:
        """Name a range of the run for torch's profiler and for the vendor's."""
        with torch.profiler.record_function(name), self.backend.mark(name) if self.backend.mark else nullcontext():
            yield

    def is_oom(self, error: BaseException) -> bool:
        """Return whether `error` means that this device or the host is out of memory."""
        if isinstance(error, self.oom_error):
            return True
        patterns = (*self.backend.out_of_memory, *cpu.OUT_OF_MEMORY)
        return isinstance(error, RuntimeError) and any(re.search(pattern, str(error)) for pattern in patterns)
