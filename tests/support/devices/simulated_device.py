"""Simulated devices for other processes: a torch plug-in, compiled once for all of them, and what processes find it by.

torch can name only one device of this kind per process, and names it when it is imported; so every test that needs the
device runs where `environment` holds from the start.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.devices.torch_extension import FLAGS, compile_extension, compiler_version
from tests.support.processes import preloaded
from tests.support.processes.launch import ROOT, forked
from tests.support.processes.made_once import made_once

SOURCES = Path(__file__).parent / "npu_device"
BUILT = ROOT / "build" / "simulated_device"  # git ignores build/
VERSION = torch.__version__.split("+")[0]
CHOICES = (
    *("HWGRPO_BACKEND", "HWGRPO_BACKEND_SELECTED", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("ASCEND_RT_VISIBLE_DEVICES", "ACME_VISIBLE_DEVICES"),
)
"""Variables that would affect the selection in a test; they are removed."""


def packages(plugin: str) -> Path:
    """Return the folder with a torch plug-in and its record, as pip would install them; compile it first.

    Args:
        plugin: "torch_npu" or another package that `npu_device/` has the Python half of.

    Raises:
        RuntimeError: the compiler is missing or failed.
    """
    compiled = _compiled()

    def make(folder: Path) -> None:
        package, record = folder / plugin, folder / f"{plugin}-{VERSION}.dist-info"
        package.mkdir(parents=True)
        record.mkdir()
        there = compiled.parent / plugin / plugin  # links are relative to where the package will be
        for name, source in (
            ("__init__.py", SOURCES / f"{plugin}.py"),
            ("device_module.py", SOURCES / "device_module.py"),
            ("_device.so", compiled),
        ):
            (package / name).symlink_to(os.path.relpath(source, there))
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {plugin.replace('_', '-')}\nVersion: {VERSION}\n"
        )
        # as torch-npu has it: `import torch` imports the device
        (record / "entry_points.txt").write_text(f"[torch.backends]\n{plugin} = {plugin}:_autoload\n")

    return made_once(compiled.parent / plugin, make)


def _compiled() -> Path:
    """Return the compiled extension, the same for every device: loading sets the device name."""
    key = hashlib.sha256(repr((compiler_version(), torch.__version__, sys.version_info[:2], FLAGS)).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        key.update(path.name.encode() + path.read_bytes())

    def make(folder: Path) -> None:
        folder.mkdir()
        compile_extension(SOURCES / "module.cpp", folder / "_device.so")

    return made_once(BUILT / key.hexdigest()[:16], make) / "_device.so"


def environment(folders: Sequence[Path], **settings: str) -> dict[str, str]:
    """Return variables for a process that imports the project and packages of `folders`, with no selection variables.

    Args:
        settings: more of them, such as SIMULATED_NPU_DEVICES (1 when left out) and SIMULATED_NPU_MB (4096).
    """
    paths = [*(ROOT / folder for folder in (".", "backends", "kernels")), *folders]
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **settings}


def train(
    *words: str, folders: Sequence[Path] = (), ranks: int = 1, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `hwgrpo train WORDS` to its end as a user would, by ranks where there are several.

    Args:
        words: recipe and settings.
        folders: with packages, that of the device among them.
        ranks: processes.
        settings: more environment variables.
    """
    words = ("-m", "hwgrpo", "train", *words)
    if ranks > 1:
        return forked(ranks, *words, packages=folders, **settings)
    return preloaded.run(0, *words, env=environment(folders, **settings))
