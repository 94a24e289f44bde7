"""The simulated NPU for other processes: its torch_npu, compiled once, and what they find it by.

torch can name only one device of this kind per process, and names it when it is imported; so every test that needs the
device runs where `environment` holds from the start.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from launch import ROOT, torchrun

SOURCES = Path(__file__).parent / "npu_device"
BUILT = ROOT / "build" / "simulated_npu"  # git ignores build/
VERSION = torch.__version__.split("+")[0]
FLAGS = (
    *("-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_device"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
)
CHOICES = ("HWGRPO_BACKEND", "HWGRPO_BACKEND_SELECTED", "ASCEND_RT_VISIBLE_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables that would choose for a test; they are taken out."""


def packages() -> Path:
    """Return the folder with the package torch_npu and its record, as pip would install them; compile it first.

    Raises:
        RuntimeError: the compiler is missing or failed.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except OSError as error:
        raise RuntimeError(
            f"the simulated NPU is made by a C++ compiler, and {compiler[0]!r} is missing: {error}"
        ) from error
    key = hashlib.sha256(repr((version, torch.__version__, sys.version_info[:2], FLAGS)).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        key.update(path.name.encode() + path.read_bytes())
    folder = BUILT / key.hexdigest()[:16]
    if not folder.is_dir():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            made = Path(scratch) / "site"
            _make(made, compiler, Path(os.path.relpath(SOURCES, folder / "torch_npu")))
            try:
                made.rename(folder)  # at once, so that nobody meets half of it
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
    return folder


def _make(folder: Path, compiler: list[str], sources: Path) -> None:
    """Make the folder; `sources` leads to them from its package, where it will be."""
    package, record = folder / "torch_npu", folder / f"torch_npu-{VERSION}.dist-info"
    package.mkdir(parents=True)
    record.mkdir()
    (package / "__init__.py").symlink_to(sources / "torch_npu.py")
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {VERSION}\n")
    # as torch-npu has it: `import torch` imports the device
    (record / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    torch_folder = Path(torch.__file__).parent
    included = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
    command = [*compiler, *FLAGS, *(f"-isystem{path}" for path in (*included, sysconfig.get_paths()["include"]))]
    command += [str(SOURCES / "module.cpp"), "-o", str(package / "_device.so"), f"-L{torch_folder / 'lib'}"]
    command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def environment(**settings: str) -> dict[str, str]:
    """Return the variables of a process that has the device.

    Args:
        settings: more of them, such as SIMULATED_NPU_DEVICES (1 when left out) and SIMULATED_NPU_MB (4096).
    """
    return _environment((packages(),), settings)


def train(*words: str, npus: int = 0, ranks: int = 1, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `hwgrpo train WORDS` to its end as a user would, by torchrun where there are several ranks.

    Args:
        words: recipe and settings.
        npus: how many simulated NPUs the host has.
        ranks: processes.
        settings: more environment variables.
    """
    device = (packages(),) if npus else ()
    settings = {"SIMULATED_NPU_DEVICES": str(npus), **settings}
    words = ("-m", "hwgrpo", "train", *words)
    if ranks > 1:
        return torchrun(ranks, *words, packages=device, **settings)
    return subprocess.run(
        [sys.executable, *words],
        env=_environment(device, settings),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _environment(more: tuple[Path, ...], settings: dict[str, str]) -> dict[str, str]:
    folders = [*(ROOT / folder for folder in (".", "backends", "kernels", "tests/support")), *more]
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", **settings}
