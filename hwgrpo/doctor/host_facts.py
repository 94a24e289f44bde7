"""Facts about the host besides its devices: files, limits, environment variables. All sources can be injected."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hwgrpo.doctor import redact

SHOWN_PREFIXES = (
    "HWGRPO_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "VLLM_", "NCCL_", "HCCL_", "GLOO_", "CUDA_",
    "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ASCEND_", "NPU_", "TASK_QUEUE_", "OMP_", "MKL_", "RAY_", "SLURM_",
    "DS_", "LC_",
)  # fmt: skip
SHOWN = ("LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "CC", "CXX")
"""Variables that affect a run and are listed in a report."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about a host and this process. The defaults describe a host without faults."""

    python: tuple[int, int, int] = (3, 11, 0)
    executable: str = ""
    in_venv: bool = True
    platform: str = ""
    cores: int = 1
    memory: int | None = None
    """Bytes of main memory."""
    c_compiler: str | None = None
    """Command with which Triton would compile its launcher; None: there is none."""
    python_header: str | None = None
    """Folder of Python.h; None where it is missing."""
    shm: int | None = None
    """Size of /dev/shm in bytes; None where it is missing."""
    cache: str = ""
    """Folder in which the hub's client keeps models."""
    cache_free: int | None = None
    """Bytes free in it; None where unknown."""
    cache_writable: bool = True
    encoding: str = "utf-8"
    """Text encoding of this process."""
    open_files: int | None = None
    """Limit of open files per process; None: no limit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that affect a run, without secrets."""

    def to_json(self) -> dict[str, Any]:
        """Return a copy of dicts, lists, strings and numbers."""
        return asdict(self)


def gather_host(root: str | Path = "/", environ: Mapping[str, str] = os.environ) -> HostFacts:
    """Gather the facts about this host.

    Args:
        root: folder that holds /dev and /proc.
        environ: environment variables.
    """
    root = Path(root)
    cache = _cache_folder(environ)
    existing = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), cache)
    shown = {name: value for name, value in sorted(environ.items()) if name in SHOWN or name.startswith(SHOWN_PREFIXES)}
    return HostFacts(
        python=sys.version_info[:3],
        executable=sys.executable or "",
        in_venv=sys.prefix != sys.base_prefix or "CONDA_PREFIX" in environ,
        platform=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(root),
        c_compiler=_c_compiler(environ),
        python_header=_python_header(),
        shm=_size_of(root / "dev/shm"),
        cache=str(cache),
        cache_free=_free(existing),
        cache_writable=os.access(existing, os.W_OK),
        encoding=(getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)).lower(),
        open_files=_open_files(),
        environment=redact.variables(shown),
    )


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which the hub's client keeps models."""
    home = Path(environ.get("HOME") or "~").expanduser()
    base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or base / "huggingface") / "hub")


def _c_compiler(environ: Mapping[str, str]) -> str | None:
    names = [environ["CC"].split()[0]] if environ.get("CC", "").split() else ["gcc", "clang"]
    return next((name for name in names if shutil.which(name, path=environ.get("PATH"))), None)


def _python_header() -> str | None:
    folder = Path(sysconfig.get_path("include"))
    return str(folder) if (folder / "Python.h").is_file() else None


def _memory(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    total = next((line.split()[1] for line in lines if line.startswith("MemTotal:")), "")
    return int(total) * 1024 if total.isdigit() else None


def _size_of(folder: Path) -> int | None:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    return stats.f_frsize * stats.f_blocks


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
