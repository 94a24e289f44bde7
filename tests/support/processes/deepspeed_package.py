"""DeepSpeed for the tests that need it: the environment's, or fetched; and what it compiles of itself, made once."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.processes.launch import forked
from tests.support.processes.made_once import made_once
from tests.support.processes.wheels import FETCHED, fetched

PACKAGES = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
COMPILE = "from deepspeed.ops.op_builder import ShareMemCommBuilder; ShareMemCommBuilder().load()"


def folders() -> list[Path]:
    """Return the folders of packages that a process needs beside its environment's; fetch them first.

    Raises:
        RuntimeError: pip cannot get them.
    """
    return [] if importlib.util.find_spec("deepspeed") is not None else [fetched("deepspeed", PACKAGES)]


def with_deepspeed(ranks: int, *words: str, **extra: str) -> CompletedProcess[str]:
    """Run WORDS by ranks on a CPU with DeepSpeed at hand.

    Raises:
        RuntimeError: pip cannot get it, or there is no C++ compiler, or it fails.
    """
    packages = folders()
    variables = {"PATH": _path(packages), "TORCH_EXTENSIONS_DIR": str(compiled()), "DS_ACCELERATOR": "cpu", **extra}
    return forked(ranks, *words, packages=packages, also=["deepspeed"], **variables)


def compiled() -> Path:
    """Return the folder with what DeepSpeed compiles of itself as it starts on a CPU; compile it first.

    Raises:
        RuntimeError: as `with_deepspeed` does.
    """
    if shutil.which("c++") is None:
        raise RuntimeError("DeepSpeed compiles a part of itself as it starts: install g++ (apt-get install g++)")
    packages = folders()
    folder = (packages[0] if packages else FETCHED) / "deepspeed-compiled"
    return made_once(folder, lambda there: compile_into(there, packages, _path(packages)))


def _path(packages: Sequence[Path]) -> str:
    """Return the search path of programs with DeepSpeed's ninja first."""
    programs = packages[0] / "bin" if packages else Path(sys.executable).parent
    return os.pathsep.join([str(programs), os.environ["PATH"]])


def compile_into(folder: Path, packages: Sequence[Path], path: str) -> None:
    """Compile what DeepSpeed loads on a CPU; under load that takes longer than tests give their processes."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(folder),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"DeepSpeed cannot compile its part for a CPU:\n{done.stderr[-2000:]}")
