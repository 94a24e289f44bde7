"""The real torch-npu with a device: CANN's runtime over host memory, and operators that compute on the host.

A process gets it by three variables: torch-npu and a package of ours on PYTHONPATH, the libraries on LD_LIBRARY_PATH.
Both packages are loaded by `import torch`, through the entry points they bring, as torch-npu is on a host with NPUs.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch

from tests.support.devices.torch_extension import FLAGS, compile_extension, compiler_version
from tests.support.processes.launch import ROOT
from tests.support.processes.made_once import made_once
from tests.torch_npu import cann_libraries, torch_npu_process, torch_npu_wheel

SOURCES = Path(__file__).parent / "cann"
BUILT = ROOT / "build" / "virtual_acl"  # git ignores build/


def packages() -> Path:
    """Return the folder with the package virtual_ascend and its record; compile it first.

    Raises:
        RuntimeError: the compiler is missing or failed.
    """
    source = SOURCES / "host_compute.cpp"
    modules = sorted(file.name for file in (SOURCES / "virtual_ascend").glob("*.py"))
    key = repr((compiler_version(), torch.__version__, sys.version_info[:2], FLAGS, source.read_text(), modules))
    folder = BUILT / hashlib.sha256(key.encode()).hexdigest()[:16]
    there = Path(os.path.relpath(SOURCES, folder / "virtual_ascend"))  # links are relative to where the package will be

    def make(made: Path) -> None:
        package, record = made / "virtual_ascend", made / "virtual_ascend-1.dist-info"
        package.mkdir(parents=True)
        record.mkdir()
        for name in modules:
            (package / name).symlink_to(there / "virtual_ascend" / name)
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: virtual-ascend\nVersion: 1\n")
        (record / "entry_points.txt").write_text("[torch.backends]\nvirtual_ascend = virtual_ascend:_autoload\n")
        compile_extension(source, package / "_host.so")

    return made_once(folder, make)


def environment(**settings: str) -> dict[str, str]:
    """Return the variables of a process that has the device.

    Args:
        settings: more of them.
    """
    libraries = cann_libraries.made(torch_npu_wheel.folder("2.13.0"), "host_memory.c", "one_rank_hccl.cpp")
    settings = {"TASK_QUEUE_ENABLE": "0", **settings}
    return torch_npu_process.environment(libraries, (packages(),), **settings)
