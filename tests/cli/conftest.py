"""The command line as a user meets it: a process of its own (forked), its output and its exit code."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import made_before
from tests.support.processes import preloaded

ROOT = Path(__file__).resolve().parents[2]

Hwgrpo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    made_before.link_into(folder)
    return folder


def environment(cache: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))
    return {**os.environ, "PYTHONPATH": path, "HWGRPO_CACHE": str(cache), "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture
def hwgrpo(tmp_path: Path, cache: Path) -> Hwgrpo:
    """Return a function that runs `hwgrpo WORDS` in an empty folder, where torch is imported already."""

    def run(*words: object, **extra: str) -> subprocess.CompletedProcess[str]:
        return preloaded.run(0, "-m", "hwgrpo", *map(str, words), cwd=tmp_path, env=environment(cache, **extra))

    return run


@pytest.fixture
def fresh(tmp_path: Path, cache: Path) -> Hwgrpo:
    """Return the same for tests of what comes before torch is imported: a process that has imported nothing."""

    def run(*words: object, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hwgrpo", *map(str, words)],
            cwd=tmp_path,
            env=environment(cache, **extra),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
