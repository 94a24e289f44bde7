"""Facts about a host: `tier0` gathers them without torch, `tier1` imports torch in a child process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

REQUEST_VARIABLE = "HWGRPO_BACKEND"
"""Request of the user where the configuration is `auto`."""
SELECTED_VARIABLE = "HWGRPO_BACKEND_SELECTED"
"""What the launching process decided; its workers inherit it."""


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """Facts from torch about one device type."""

    available: bool = False
    count: int = 0
    names: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    """The architecture of each device, where torch reports it."""
    built_for: tuple[str, ...] = ()
    """The architectures this build of torch has kernels for, where torch reports them."""
    problem: str | None = None
    """The exception or warning with which torch explained why the device is not available."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """Tier 1: what `import torch` and a look at its devices gave in a child process."""

    imported: bool
    timed_out: bool = False
    """The child process was ended before it was done: nothing is known of why."""
    without_plugins: bool = False
    """It failed, but works with TORCH_DEVICE_BACKEND_AUTOLOAD=0; the fields below come from that second try."""
    errors: tuple[str, ...] = ()
    """The chain of exceptions of the failed import, the root cause last."""
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    plugins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Installed device plug-in -> the chain of exceptions of its import, empty when it imports."""
    devices: Mapping[str, TorchDevice] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TorchFacts:
        """Build it from the output of the child."""
        lists = ("names", "archs", "built_for")
        devices = {
            name: TorchDevice(**{**device, **{key: tuple(device.get(key, ())) for key in lists}})
            for name, device in record.get("devices", {}).items()
        }
        plugins = {name: tuple(errors) for name, errors in record.get("plugins", {}).items()}
        errors = tuple(record.get("errors", ()))
        return cls(**{**record, "devices": devices, "plugins": plugins, "errors": errors})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a probe may look at. The default is a host with nothing on it."""

    system: str = "linux"
    machine: str = "x86_64"
    python: str = ""
    device_nodes: tuple[str, ...] = ()
    """Names under /dev that match a pattern of some backend."""
    driver_files: tuple[str, ...] = ()
    """Paths that match a pattern of some backend's `driver_files`."""
    no_access: tuple[str, ...] = ()
    """Those of them, and "dxg", that this user may not open."""
    nvidia_driver: str | None = None
    tegra: str | None = None
    """Release of Jetson Linux ("R36"), "unknown" where only its GPU shows; None: this is no Jetson."""
    mig_instances: int | None = None
    """Instances of NVIDIA GPUs that can be divided (MIG); None: no GPU can, as far as the driver shows it."""
    kfd_gpus: int | None = None
    """GPUs in the topology of the amdkfd driver; None when it cannot be read."""
    cann: str | None = None
    """Version of the CANN toolkit by its install record, or its path."""
    cann_version: str | None = None
    """Version of the CANN toolkit whose environment is sourced (ASCEND_HOME_PATH)."""
    cann_script: str | None = None
    """A set_env.sh of CANN that is installed here, to be sourced."""
    npu_driver: str | None = None
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution -> version."""
    torch_version: str | None = None
    torch_build: str | None = None
    """"cpu", "cuda", "rocm" or "xpu": target of the torch build; None when torch is absent or it is unknown."""
    torch_toolkit: str | None = None
    """Version of CUDA or HIP that torch was built with."""
    shadows: Mapping[str, str] = field(default_factory=dict)
    """Module -> a file of another kind that Python imports in its place, for a folder that it looks in first."""
    torch_plugins: tuple[str, ...] = ()
    """Names in the entry-point group `torch.backends`: torch imports these modules when it is imported."""
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Group of `ENTRY_POINT_GROUPS` -> the names in it, each as "name (distribution)"."""
    unreadable: tuple[str, ...] = ()
    """Distributions whose list of entry points is not text: loading entry points fails, in torch, too."""
    variables: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    """"docker", "kubernetes", ...: what kind of container this is; None when there is no sign of one."""
    wsl: bool = False
    wsl_gpu: bool = False
    """/dev/dxg is there, through which WSL offers GPUs."""
    scheduler: str | None = None
    """What started this process, as text."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Accelerators that there is no built-in backend for -> the path that shows one."""
    torch: TorchFacts | None = None
    """Tier 1; None when it has not been gathered."""

    def nodes(self, *patterns: str) -> tuple[str, ...]:
        """Return the device nodes that match one of `patterns`."""
        return tuple(node for node in self.device_nodes if any(fnmatch(node, pattern) for pattern in patterns))

    def drivers(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the paths that match one of a backend's `driver_files`."""
        return tuple(file for file in self.driver_files if any(fnmatch(file, f"/{pattern}") for pattern in patterns))

    def to_json(self) -> dict[str, Any]:
        """Return a copy of dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)
