"""NVIDIA's compute-sanitizer finds no access outside of a tensor and no race in the row kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("compute-sanitizer")
FOUND = 9
pytestmark = pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed; it comes with CUDA's toolkit")


def sanitized(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).parent / "sanitized_rows.py"
    # Without a cache of memory between torch and the driver, each tensor ends where its memory does.
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(TOOL), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(program), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_row_kernels_are_clean(tool):
    done = sanitized(tool)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "launched" in done.stdout


def test_a_load_beyond_all_memory_is_seen():
    done = sanitized("memcheck", "beyond")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout
