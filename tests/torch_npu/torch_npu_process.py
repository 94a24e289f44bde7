"""Processes that have the real torch-npu: without CANN, with libraries in its place, or with a virtual device."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.devices.simulated_npu import CHOICES
from tests.support.processes.launch import ROOT
from tests.torch_npu import torch_npu_wheel

LAYER = "TORCH_NPU_LAYER"
"""Names the folder of tests/torch_npu whose tests a process is for."""
CANN = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH")
"""Variables that locate a CANN of this machine; they are removed."""


def environment(libraries: Path | None = None, packages: tuple[Path, ...] = (), **settings: str) -> dict[str, str]:
    """Return the variables of a process that has the torch-npu which set-up installs.

    Args:
        libraries: a folder with libraries in the place of CANN's.
        packages: more folders of packages.
        settings: more variables.
    """
    ours = (ROOT / folder for folder in (".", "backends", "kernels"))
    path = (*ours, torch_npu_wheel.folder("2.13.0"), *packages)
    kept = {name: value for name, value in os.environ.items() if name not in (*CHOICES, *CANN)}
    settings = {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **settings}
    return {**kept, **({"LD_LIBRARY_PATH": str(libraries)} if libraries else {}), **settings}


def run(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end."""
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False
    )


def tests_of(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder of tests/torch_npu in a process that has its device."""
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder), env={**env, LAYER: folder.name})
