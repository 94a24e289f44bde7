"""GPUs that are not there: Triton compiles for them and checks their limits, and a launch does nothing.

The host code runs as it is, on CPU tensors. Where it would launch a kernel, the binary for the chosen GPU exists, and
the driver here has kept it.
"""

from collections.abc import Callable, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Chip(NamedTuple):
    """What Triton asks of a GPU.

    Args:
        target: architecture and threads per warp.
        shared: bytes of shared memory (AMD: LDS) a program may have.
    """

    target: GPUTarget
    shared: int


CHIPS: Mapping[str, Chip] = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 166912),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 232448),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 232448),
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 101376),
    "gfx90a": Chip(GPUTarget("hip", "gfx90a", 64), 65536),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 65536),
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), 163840),
    "gfx1100": Chip(GPUTarget("hip", "gfx1100", 32), 65536),
}

_devices = count()


class StubDriver(DriverBase):
    """One GPU, as a device of its own: nothing is compiled for it yet.

    Args:
        chip: a key of `CHIPS`.

    Attributes:
        loaded: name of each binary, in the order in which it was first needed; one entry per compilation.
        launched: the compiled kernel of each launch.
    """

    def __init__(self, chip: str):
        super().__init__()
        self.chip = CHIPS[chip]
        self.device = next(_devices)  # Triton keeps binaries and limits by device number
        self.loaded: list[str] = []
        self.launched: list[Any] = []
        properties = {
            "max_shared_mem": self.chip.shared,
            "multiprocessor_count": 132,
            "warpSize": self.chip.target.warp_size,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties, load_binary=self._load_binary)

    def launches_of(self, call: Callable[[], object]) -> list[Any]:
        """Run host code with this as the active GPU and return the kernels it launched."""
        triton.runtime.driver.set_active(self)
        before = len(self.launched)
        call()
        return self.launched[before:]

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Stand in for the C launcher that Triton would build for a kernel."""

        def launch(*_: Any) -> None:
            kernels = source.fn.device_caches[self.device][0].values()
            [kernel] = [kernel for kernel in kernels if kernel.metadata is metadata]
            self.launched.append(kernel)

        return launch

    def _load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary[:4] == b"\x7fELF", f"{name} is no binary"
        self.loaded.append(name)
        module, function, registers, spills, most_threads = 1, 1, 0, 0, 1024
        return module, function, registers, spills, most_threads

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("no C launcher is built for a GPU that is not there")

    def get_current_target(self) -> GPUTarget:
        return self.chip.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed on a GPU that is not there")
