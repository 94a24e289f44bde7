"""C++ extensions of torch that tests compile."""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import torch

FLAGS = (
    *("-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
)


def compiler() -> list[str]:
    """Return the C++ compiler as arguments of a command."""
    return shlex.split(os.environ.get("CXX") or "c++")


def compiler_version() -> bytes:
    """Return the version output of the compiler.

    Raises:
        RuntimeError: it is missing.
    """
    try:
        return subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout
    except OSError as error:
        raise RuntimeError(f"this needs a C++ compiler, and {compiler()[0]!r} is missing: {error}") from error


def compile_extension(source: Path, target: Path) -> None:
    """Compile a file into an extension module `target`, a .so whose stem is the module's name.

    Raises:
        RuntimeError: the compiler failed.
    """
    torchs = Path(torch.__file__).parent
    included = (torchs / "include", torchs / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [*compiler(), *FLAGS, f"-DTORCH_EXTENSION_NAME={target.stem}", *(f"-isystem{path}" for path in included)]
    command += [str(source), "-o", str(target), f"-L{torchs / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu"]
    done = subprocess.run([*command, "-lc10"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
