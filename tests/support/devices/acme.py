"""The example plug-in installed from outside the tree, and processes that import it with its simulated device."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.devices import simulated_device
from tests.support.processes import preloaded
from tests.support.processes.launch import ROOT

SOURCE = ROOT / "tests" / "acme_plugin"


def install(scratch: Path, source: Path = SOURCE) -> Path:
    """Build and install a plug-in as its users do, from a copy outside of this repository; return where it is."""
    copy, site = scratch / "source" / source.name, scratch / "site"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(site), str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def device() -> Path:
    """Return the folder with torch_acme, which the vendor's users have installed already."""
    return simulated_device.packages("torch_acme")


def run(
    *words: str, folders: Sequence[Path], code: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `hwgrpo WORDS`, or Python code with these arguments, in a process that finds the packages in `folders`."""
    command = [sys.executable, *_arguments(words, code)]
    environ = simulated_device.environment(folders, **settings)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)


def forked(
    *words: str, folders: Sequence[Path], code: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Do what `run` does in a process that is forked from one with torch and the project; see `preloaded`."""
    return preloaded.run(0, *_arguments(words, code), env=simulated_device.environment(folders, **settings))


def _arguments(words: Sequence[str], code: str | None) -> tuple[str, ...]:
    return ("-m", "hwgrpo", *words) if code is None else ("-c", code, *words)
