"""The real torch-npu with a device: CANN's runtime over host memory, and operators that compute on the host.

A process gets it by three variables: torch-npu and a package of ours on PYTHONPATH, the libraries on LD_LIBRARY_PATH.
Both packages are loaded by `import torch`, through the entry points they bring, as torch-npu is on a host with NPUs.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import cann_libraries
import torch
import torch_npu_process
import torch_npu_wheel
from launch import ROOT
from simulated_npu import FLAGS

SOURCES = Path(__file__).parent / "cann"
BUILT = ROOT / "build" / "virtual_acl"  # git ignores build/


def packages() -> Path:
    """Return the folder with the package virtual_ascend and its record; compile it first.

    Raises:
        RuntimeError: the compiler is missing or failed.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    source = SOURCES / "host_compute.cpp"
    modules = sorted(file.name for file in (SOURCES / "virtual_ascend").glob("*.py"))
    key = repr((compiler, torch.__version__, sys.version_info[:2], FLAGS, source.read_text(), modules))
    folder = BUILT / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.is_dir():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            made = Path(scratch) / "site"
            _make(made, compiler, source, Path(os.path.relpath(SOURCES, folder / "virtual_ascend")))
            try:
                made.rename(folder)  # at once, so that nobody meets half of it
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
    return folder


def _make(folder: Path, compiler: list[str], source: Path, sources: Path) -> None:
    package, record = folder / "virtual_ascend", folder / "virtual_ascend-1.dist-info"
    package.mkdir(parents=True)
    record.mkdir()
    for file in (SOURCES / "virtual_ascend").glob("*.py"):
        (package / file.name).symlink_to(sources / "virtual_ascend" / file.name)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: virtual-ascend\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[torch.backends]\nvirtual_ascend = virtual_ascend:_autoload\n")
    torchs = Path(torch.__file__).parent
    included = (torchs / "include", torchs / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = [each.replace("=_device", "=_host") for each in FLAGS]
    command = [*compiler, *flags, *(f"-isystem{each}" for each in included), str(source)]
    command += [
        "-o",
        str(package / "_host.so"),
        f"-L{torchs / 'lib'}",
        "-ltorch_python",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(
            f"the virtual NPU computes by what a C++ compiler makes, and {compiler[0]!r} is missing: {error}"
        ) from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def environment(**settings: str) -> dict[str, str]:
    """Return the variables of a process that has the device.

    Args:
        settings: more of them.
    """
    libraries = cann_libraries.made(torch_npu_wheel.folder("2.13.0"), "host_memory.c")
    settings = {"TASK_QUEUE_ENABLE": "0", **settings}
    return torch_npu_process.environment(libraries, (packages(),), **settings)
