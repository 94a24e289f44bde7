"""The command line as a user meets it: a process of its own (forked), its output and its exit code."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest

ROOT = Path(__file__).resolve().parents[2]

Hwgrpo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def hwgrpo(tmp_path: Path, cache: Path) -> Hwgrpo:
    """Return a function that runs `hwgrpo WORDS` in an empty folder."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))
    environment = {**os.environ, "PYTHONPATH": path, "HWGRPO_CACHE": str(cache), "OMP_NUM_THREADS": "1"}

    def run(*words: object, **extra: str) -> subprocess.CompletedProcess[str]:
        return preloaded.run(0, "-m", "hwgrpo", *map(str, words), cwd=tmp_path, env={**environment, **extra})

    return run
